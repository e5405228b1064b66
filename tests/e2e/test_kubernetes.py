"""Kubernetes manifests, checked against the types that Kubernetes and Kubeflow publish."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import import_module
from typing import Any

import pytest
import yaml

from lab.settings.config import check_batch, load
from tests.conftest import ROOT

# Importing the published types takes a second, which no other process of xdist need spend.
pytestmark = pytest.mark.xdist_group("kubernetes")
V1, V2 = "kubeflow.training.models", "kubeflow_trainer_api.models"
FOLDER = ROOT / "launch" / "kubernetes"
MODELS = {
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "PyTorchJob": "KubeflowOrgV1PyTorchJob",
}
SHAPES = {"str": str, "int": int, "bool": bool, "object": object, "list": list, "dict": dict}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def as_model(kind: str, value: Any) -> Any:
    """Parse `value` as the published type `kind`, without an API server's leniency.

    Raises:
        KeyError: a field that the type does not have; a server would drop it.
        TypeError: a value of another type.
        ValueError: a field that the type must have.
    """
    outer = re.split(r"[\[(]", kind)[0]
    expected = SHAPES.get(outer, dict)
    if not isinstance(value, expected) or (kind == "int" and isinstance(value, bool)):
        raise TypeError(f"{value!r} is no {kind}")
    if outer == "list":
        return [as_model(kind[5:-1], item) for item in value]
    if outer == "dict":
        inner = kind[5:-1].removeprefix("str, ")
        return {key: as_model(inner, item) for key, item in value.items()}
    if outer in SHAPES:
        return value
    model = getattr(import_module(V1), kind)
    names = {field: name for name, field in model.attribute_map.items()}
    fields = {
        names[field]: as_model(model.openapi_types[names[field]], item)
        for field, item in value.items()
    }
    return model(**fields)


def check(manifest: dict[str, Any]) -> None:
    as_model(MODELS[manifest["kind"]], manifest)


def check_v2(manifest: dict[str, Any]) -> None:
    """Parse a manifest of Trainer v2 as its published type, which drops what it does not know."""
    model = getattr(import_module(V2), f"TrainerV1alpha1{manifest['kind']}")
    assert model.from_dict(manifest).to_dict() == manifest


def read_v2() -> tuple[dict[str, Any], dict[str, Any]]:
    runtime, job = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())
    return runtime, job


def replicated_job(runtime: dict[str, Any]) -> dict[str, Any]:
    (found,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return found


def pod(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def test_all_manifests_are_applied_and_keep_to_their_types() -> None:
    resources = read("kustomization.yaml")["resources"]
    assert {*resources, "kustomization.yaml", "trainjob.yaml"} == {
        str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml")
    }
    for name in resources:
        check(read(name))


def test_arguments_suit_every_number_of_pods() -> None:
    manifest = read("pytorchjob.yaml")
    spec, (container,) = manifest["spec"], pod(manifest)["containers"]
    elastic, config = spec["elasticPolicy"], load(container["args"])
    assert elastic["minReplicas"] <= spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    for num_pods in range(elastic["minReplicas"], elastic["maxReplicas"] + 1):
        check_batch(config, num_pods * int(spec["nprocPerNode"]))
    assert config.resume == "auto"
    assert config.cell and config.checkpoint_every


def test_trainjob_and_its_runtime_keep_to_their_types_and_names() -> None:
    runtime, job = read_v2()
    for manifest in (runtime, job):
        check_v2(manifest)
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    node = replicated_job(runtime)
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert node["name"] == container["name"] == "node"  # which Trainer's torch plugin looks for
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (tag,) = (image["newTag"] for image in read("kustomization.yaml")["images"])
    trainer = job["spec"]["trainer"]
    assert trainer["image"] == f"scaling-lab:{tag}"
    config = load(trainer["args"])
    check_batch(config, trainer["numNodes"] * trainer["numProcPerNode"])
    assert config.resume == "auto" and config.cell and config.checkpoint_every


OF_V1 = pod(read("pytorchjob.yaml"))
OF_V2 = replicated_job(read_v2()[0])["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("spec", [OF_V1, OF_V2], ids=["PyTorchJob", "TrainJob"])
def test_pod_fits_its_image_and_its_claim(spec: dict[str, Any]) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"USER {spec['securityContext']['runAsUser']}\n" in dockerfile
    wait = re.search(r"PET_SHUTDOWN_TIMEOUT=(\d+)", dockerfile)
    assert wait and spec["terminationGracePeriodSeconds"] > int(wait[1])
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    claim = volumes[mounts["/workspace/runs"]]["persistentVolumeClaim"]["claimName"]
    assert claim == read("runs.yaml")["metadata"]["name"]
    assert "VOLUME /workspace/runs\n" in dockerfile


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kustomization_names_the_image() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True
    )
    (tag,) = (image["newTag"] for image in read("kustomization.yaml")["images"])
    (job,) = (each for each in yaml.safe_load_all(built.stdout) if each["kind"] == "PyTorchJob")
    assert pod(job)["containers"][0]["image"] == f"scaling-lab:{tag}"
