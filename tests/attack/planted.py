"""Secrets planted in forty places, each in ten shapes; a study, its pages and its tables show none.

The places: settings of the command line and of files, variables, errors, and what a model prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attack.outcome import SURVIVED, Attempt
from tests.conftest import ROOT

SETTINGS = {
    "a setting": "+model.api_token='{}'",
    "a setting in camel case": "+model.accessToken='{}'",
    "a setting of several words": "+model.my_db_password='{}'",
    "a nested setting": "+model.options={{client_secret:'{}'}}",
    "a list": "+model.passwords=['{}','x']",
    "a mapping": "+model.headers={{Authorization:'{}'}}",
    "the user of a URL": "+model.url='https://eva:{}@host/x'",
    "the query of a URL": "+model.link='https://host/x?sig={}&v=1'",
    "a header": "+model.header='Authorization: Bearer {}'",
    "a word of a text": "+model.note='use api_key={} for all'",
    "a setting of the data": "+data.access_key='{}'",
    "a setting of the optimizer": "+optim.license_token='{}'",
}
IN_FILE = "a setting of a file"
VARIABLES = (
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "SLURM_JWT"),
    *("NCCL_PASS", "NCCL_AUTH_TOKEN", "HOROVOD_AUTH", "NVIDIA_CREDENTIALS", "GLOO_SECRET"),
    *("TORCH_API_KEY", "CUDA_PASSWORD", "OMP_TOKEN"),
)
ERRORS = {
    "an error: key=value": "refused with token={}",
    "an error: key: value": "refused, password: {}",
    "an error: JSON": 'got {{"secret": "{}", "v": 1}}',
    "an error: the user of a URL": "cannot reach https://eva:{}@host/x",
    "an error: the query of a URL": "cannot reach https://host/x?v=1&sig={}&w=2",
    "an error: a header": "sent Authorization: Bearer {}",
    "an error: an option": "called with --api-key {}",
    "an error: a signature": "X-Amz-Signature={} is stale",
    "an error: a key": "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    "an error: a cookie": "Cookie: session={}",
}
PRINTS = ("its output", "its errors", "a warning", "a log")
PLACES = (*SETTINGS, IN_FILE, *VARIABLES, *ERRORS, *PRINTS)
SHAPES = (
    *("{}", "ghp_{0}{0}{0}", "sk-{0}{0}{0}", "hf_{0}{0}{0}", "AKIA{0}{0}{0}", "eyJhbGci.{}.{}"),
    *("1234-{}", "a.b!{}^*~", "{}+/==", "pässwort{}"),
)
FILES = ("leaky.py", "said.json", "mine/data/own.yaml")  # in which they are
QUICK = ("strategy=none", "batch_size=8", "steps=4", "device=cpu")

CODE = """
import json, logging, sys, warnings
import torch
from pathlib import Path
from lab.data import synthetic

def data(seed, device, **given):
    return synthetic.synthetic(
        seed=seed, device=device, shape=[1, 4, 4], num_classes=2, num_images=64
    )

def sgd(params, **given):
    return torch.optim.SGD(params, lr=given["lr"])

class Net(torch.nn.Module):
    def __init__(self, image_shape, num_classes, fails=False, **given):
        super().__init__()
        self.linear = torch.nn.Linear(image_shape[0] * image_shape[1] * image_shape[2], num_classes)
        said = json.loads(Path(__file__).with_name("said.json").read_text())
        print("token=" + said["its output"])
        print("token=" + said["its errors"], file=sys.stderr)
        warnings.warn("token=" + said["a warning"])
        logging.error("token=" + said["a log"])
        if fails:
            raise ValueError(said["error"])

    def forward(self, images):
        return self.linear(images.flatten(1))
"""


def secret(place: str, turn: int) -> str:
    """Return the secret of a place, in the shape that it has in this turn."""
    number = PLACES.index(place)
    mark = _mark(place)
    return SHAPES[(number + turn) % len(SHAPES)].format(*[mark] * 2)


def plant(folder: Path, turn: int) -> tuple[list[str], dict[str, str]]:
    """Leave a model, data and a file of settings in a folder; return arguments and variables.

    One of the two cells that they make fails.
    """
    (folder / "leaky.py").write_text(CODE)
    said = {place: secret(place, turn) for place in PRINTS}
    lines = [text.format(secret(place, turn)) for place, text in ERRORS.items()]
    (folder / "said.json").write_text(json.dumps({**said, "error": " and ".join(lines)}))
    choice = folder / "mine/data/own.yaml"
    choice.parent.mkdir(parents=True)
    in_file = json.dumps(secret(IN_FILE, turn))
    choice.write_text(f"_target_: leaky.data\npassphrase: {in_file}\n")
    words = [text.format(secret(place, turn)) for place, text in SETTINGS.items()]
    own = ["model=leaky.Net", "data=own", "optim=leaky.sgd", "+optim.lr=0.01", "config_dir=mine"]
    return [*own, *words, "model.fails=false,true"], {v: secret(v, turn) for v in VARIABLES}


def attack(seed: int, count: int, folder: Path) -> Iterator[Attempt]:
    """Make a study with secrets in all places, read it in all ways, and look for each of them."""
    for turn in range(seed, seed + count):
        place = folder / str(turn)
        place.mkdir(parents=True)
        words, variables = plant(place, turn)
        with titles() as shown:
            said = _run(place, variables, "sweep", "study=s", "recorder=wandb", *QUICK, *words)
        assert b"1 of 2 cells done" in said, said
        said += b"".join(_run(place, {}, name, "runs/s") for name in ("report", "plot", "explain"))
        found = dict.fromkeys(shown, "a list of processes")
        found |= dict.fromkeys(found_in(said), "what is printed") | found_below(place)
        for each in PLACES:
            outcome = "secret" if each in found else SURVIVED
            what = f"{each}, as {secret(each, turn)}"
            yield Attempt("planted secrets", what, outcome, found.get(each, ""))


def found_in(text: bytes) -> Iterator[str]:
    """Yield the places whose secrets a text shows."""
    lowered = text.lower()
    yield from (place for place in PLACES if _mark(place).encode() in lowered)


def found_below(folder: Path) -> dict[str, str]:
    """Return the places whose secrets a folder shows, each with the file or the name that does."""
    found = dict[str, str]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in FILES:
            found |= dict.fromkeys(found_in(path.read_bytes()), name)
        found |= dict.fromkeys(found_in(name.encode()), f"the name {name}")
    return found


@contextmanager
def titles() -> Iterator[set[str]]:
    """Collect the places whose secrets are in a list of processes meanwhile.

    The command itself is left out: there they stand as its user has typed them.
    """
    found, ended = set[str](), threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    line = path.read_bytes()
                except OSError:
                    continue  # it has ended
                if b"lab.sweep" not in line:
                    found.update(found_in(line))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        ended.set()
        looking.join()


def _run(folder: Path, variables: dict[str, str], module: str, *words: str) -> bytes:
    environment = os.environ | variables | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"lab.{module}", *words],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout


def _mark(place: str) -> str:
    return f"zq{PLACES.index(place):02d}kx"
