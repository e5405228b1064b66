## 4 fs: a full TMPDIR, with room in the runs' folder
mkdir t
try 0 'done:' unshare -m bash -c 'mount -t tmpfs -o size=4k none t; head -c 4k /dev/zero > t/x
  TMPDIR=$PWD/t T2 cell=a'

## 9 fs: runs_dir that has dots and slashes in it
try 0 'done:' T1 runs_dir=a/../b cell=c; test -e b/default/c/record.json
try 0 'done:' T1 runs_dir=a//b/ cell=c; test -e a/b/default/c/record.json

## 31 env: output in ASCII alone
base
try 0,1 'kim2017|Kim' env PYTHONIOENCODING=ascii:strict LC_ALL=C L verify kim2017
try 0 'lab.explain' env PYTHONIOENCODING=ascii:strict LC_ALL=C L explain runs/s

## 38 env: terminals of odd sizes
base; for v in 0 1 -5 abc 100000000; do
  try 0 'lab.train' env COLUMNS=$v LINES=$v T1 --help
done
try 0 'lab.advise' env COLUMNS=1 L explain runs/s

## 39 env: time zones, and a time zone that is a script
try 0 'done:' env TZ=Asia/Kathmandu T1 cell=a
grep -q '"started_at": ".*+00:00"' runs/default/a/record.json
try 0 'done:' env 'TZ=<script>alert(1)</script>' T1 study=z
try 0 'wrote' L report runs/z
if grep -q '<script>alert(1)' runs/z/report.html; then exit 1; fi

## 45 env: variables of the lab with odd values
try 0 'done:' env LAB_JOB=../../x T1 cell=a; test ! -e ../../x
try 0 'done:' env LAB_JOB=$'a\nb' LAB_SLOW_FACTOR=nan T1 cell=b
try 0 'done:' env LAB_TEST_DEVICE=x LAB_SLOW_FACTOR= T1 cell=c

## 47 env: a repository around the current folder whose settings run programs
command -v git > /dev/null || exit 0
git init -q .; git config core.fsmonitor "touch $PWD/ran; false"
git config diff.external "touch $PWD/ran"; git config filter.x.clean "touch $PWD/ran"
echo '* filter=x' > .gitattributes
try 0 'done:' T1 cell=a
try 0 'done:' env GIT_DIR="$PWD/.git" T1 cell=b
try 0 'done:' env GIT_DIR=/nonexistent T1 cell=c
test ! -e ran

## 49 cwd: modules of Python's library in the current folder
for f in json random queue platform statistics; do echo 'raise RuntimeError("mine")' > $f.py; done
try 0 'done:' T1 cell=a
try 0 'done:' T2 cell=b
try 0 '1 of 1 cells done' S study=s strategy=none

## 51 cwd: folders called lab and conf, and a file lab.py, in the current folder
mkdir lab; try 0 'done:' T1 cell=a; rmdir lab
mkdir -p conf/strategy; echo 'strategy: evil' > conf/strategy/onebit.yaml
try 0 'strategy=onebit' T1 strategy=onebit cell=b
echo 'x = 1' > lab.py; try 1 'lab' T1 cell=c

## 54 cwd: a current folder that has been removed
try 1,2 'No such file' bash -c 'mkdir d; cd d; rmdir ../d; exec T1'

## 71 streams: a terminal that hangs up during a sweep
$PY - <<'E'
import glob, os, pty, signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL); pid, end = pty.fork()
if not pid: os.execvp("S", "S study=s strategy=none,onebit world_size=2 steps=50000".split())
for _ in range(120):
    if glob.glob("runs/s/*/attempts.json"): break
    time.sleep(0.5)
time.sleep(2); os.close(end); os.waitpid(pid, 0)
E
for _ in {1..40}; do [ -z "$(ranks)" ] && break; sleep 1; done
test -z "$(ranks)"

## 75 signals: Ctrl-C twice within a tenth of a second
T1 steps=1000000 checkpoint_every=20 cell=a > o 2>&1 & p=$!
until_true test -e runs/default/a/checkpoints; sleep 1
kill -INT $p; sleep .1; kill -INT $p 2> /dev/null || true
code=0; wait $p || code=$?; test $code = 75; record a status interrupted
if grep -q Traceback o; then exit 1; fi

## 77 signals: SIGINT and SIGTERM that the parent ignores
(trap '' INT TERM; exec T1 steps=1000000 checkpoint_every=20 cell=a) > o 2>&1 & p=$!
until_true test -e runs/default/a/checkpoints; sleep 1
kill -TERM $p; code=0; wait $p || code=$?
test $code = 75; record a status interrupted

## 78 signals: SIGCHLD that the parent ignores, which hides exit codes
ends 1 'steps=-1: must be' $PY -c 'import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execvp("T2", ["T2", "steps=-1"])'

## 79 signals: a run that inherits a mask of all signals ends by SIGKILL, and goes on
$PY -c 'import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execvp("T1", ["T1", "steps=1000000", "cell=a"])' > o 2>&1 & p=$!
begun a; kill -KILL $p; wait $p || true
try 0 'done:' T1 cell=a resume=auto

## 80 signals: a storm of SIGUSR1
T1 steps=1000000 checkpoint_every=20 cell=a > o 2>&1 & p=$!
until_true test -e runs/default/a/checkpoints; sleep 1
for _ in {1..500}; do kill -USR1 $p 2> /dev/null || true; done
code=0; wait $p || code=$?; test $code = 75; record a status interrupted

## 85 races: a run's directory is renamed while it trains
T1 steps=1000000 checkpoint_every=50 cell=a > o 2>&1 & p=$!
until_true test -e runs/default/a/checkpoints; sleep 1
mv runs/default/a runs/default/b; code=0; wait $p || code=$?
test $code = 1; grep -q runs/default/a o; if grep -q Traceback o; then exit 1; fi
ls runs/default/b/checkpoints/*/DONE; test ! -e runs/default/a/record.json

## 86 races: a run's directory is replaced by a link to another's
base; cp -r runs/s/bd other; cp other/record.json r
T1 steps=1000000 checkpoint_every=100 cell=a > o 2>&1 & p=$!
begun a; mv runs/default/a x; ln -s ../../other runs/default/a
sleep 1; kill -TERM $p 2> /dev/null || true; code=0; wait $p || code=$?
test $code = 1; grep -q 'taken the place' o; cmp r other/record.json

## 93 races: links under the names that a sweep and a page will write
echo keep > precious; mkdir -p runs/s; ln -s "$PWD/precious" runs/s/study.json
try 2 "not a list of a study's grids" S study=s strategy=none
rm runs/s/study.json; ln -s "$PWD/precious" runs/s/report.html
try 0 '1 of 1 cells done' S study=s strategy=none
try 0 'wrote' L report runs/s; grep -qx keep precious

## 96 races: a run beside the cells of a sweep that goes on
S study=s strategy=none,onebit steps=2000 > o 2>&1 & p=$!
sleep 4; try 0 'done:' T1 study=s cell=mine
wait $p; grep -q '2 of 2 cells done' o; test -e runs/s/mine/record.json
try 0 'wrote' L plot runs/s

## 97 races: checkpoints are deleted while a run writes others
T1 steps=1000000 checkpoint_every=50 cell=a > o 2>&1 & p=$!
begun a; for _ in {1..20}; do rm -rf runs/default/a/checkpoints || true; sleep .2; done
kill -TERM $p 2> /dev/null || true; code=0; wait $p || code=$?
if [ $code = 75 ]; then record a status interrupted; else record a status failed; fi
if grep -q Traceback o; then exit 1; fi

## 98 races: a run is copied while it trains, and resumed from the copy
T1 steps=1000000 checkpoint_every=500 cell=a > o 2>&1 & p=$!
f=runs/default/a/checkpoints/step_000500/DONE
until_true test -e $f; cp -r runs runs2 || true
try 2 'this run ends at step 6' T1 cell=a runs_dir=runs2 resume=auto
kill -TERM $p; code=0; wait $p || code=$?; test $code = 75; record a status interrupted

## 142 model: a model that writes bytes to standard output
m <<< "import os, sys, time; $HEAD
class N(M):
    def forward(self, x):
        os.write(1, b'\xff\xfe\x1b[2J\r' * 100)
        return super().forward(x)"
try 0 'done:' U1 data.size=16 model=m.N cell=a; record a status done
try 0 'done:' U2 data.size=16 model=m.N cell=b; record b status done

## 143 model: a model that ends the process with a good exit code
acts
ends 1 '' env 'ACT=sys.exit(0)' U1 data.size=16 model=m.N cell=a; record a status failed
try 1 '0 of 1 cells done' env 'ACT=os._exit(0)' L sweep study=w device=cpu steps=6 batch_size=24 \
  threads=1 data.size=16 model=m.N strategy=none
echo 'import sys; sys.exit(0)' > q.py; ends 2 'cannot be imported' U1 data.size=16 model=q.M

## 144 model: exceptions that are no errors
acts
for k in 'type("Rude", (BaseException,), {})' GeneratorExit; do
  ends 1 '' env "ACT=raise $k" U1 data.size=16 model=m.N "cell=x${#k}"
  record "x${#k}" status failed
done
ends 1 '' env 'ACT=raise MemoryError' U1 data.size=16 model=m.N cell=m; record m status oom

## 146 model: a process that a model leaves behind
acts
try 0 'done:' env 'ACT=os.fork() or (time.sleep(20), os._exit(0))' U1 data.size=16 model=m.N cell=a
record a status done; for q in $(ranks); do kill -9 $q || true; done

## 148 model: a model that changes the current folder
acts
U='U1 data.size=16 model=m.N cell=a checkpoint_every=2 recorder=csv'
try 0 'done:' env 'ACT=os.chdir("/")' $U
test -e runs/default/a/curves.csv; test -e runs/default/a/checkpoints/step_000006/DONE
echo 'import os; os.chdir("/"); from m import M' > q.py
try 0 'done:' U1 data.size=16 model=q.M cell=b; test -e runs/default/b/record.json

## 149 model: a model that changes variables of the environment
acts; a='os.environ.update(MASTER_PORT="1", RANK="7", WORLD_SIZE="9", PATH="", HOME="/x")'
try 0 'on 2 ranks' env "ACT=$a" U2 data.size=16 model=m.N cell=a strategy=onebit
record a status done

## 150 model: a model that seeds torch anew in each step
h() { $PY -c 'import json, sys; print(json.load(open(sys.argv[1]))["replica_hash"])' $1; }
m <<< "import time; $HEAD
class N(M):
    def forward(self, x):
        torch.manual_seed(time.time_ns() % 2**31); return super().forward(x)"
try 0 'done:' U2 data.size=16 model=m.M cell=a strategy=onebit
try 0 'done:' U2 data.size=16 model=m.N cell=b strategy=onebit
test "$(h runs/default/a/record.json)" = "$(h runs/default/b/record.json)"

## 151 model: a model that changes torch for all
acts; U='U1 data.size=16 model=m.N'
try 0 'done:' env 'ACT=torch.set_default_dtype(torch.float64)' $U cell=a
try 1 'does not require grad' env 'ACT=torch.set_grad_enabled(False)' $U cell=b
record b status failed

## 152 model: a model that sets an alarm, whose signal ends its ranks
acts
ends 1 SIGALRM env 'ACT=signal.alarm(1)' U2 data.size=16 model=m.N steps=200000; test -z "$(ranks)"

## 153 model: a model that takes standard output or the clock away
acts
try 0 '' env 'ACT=sys.stdout = None' U1 data.size=16 model=m.N cell=a; record a status done
try 0 '' env 'ACT=time.time = lambda: 0.0' U1 data.size=16 model=m.N cell=b; record b status done

## 155 model: a model that makes collective calls of its own
acts; U='U2 data.size=16 model=m.N strategy=onebit'; a='int(os.environ["RANK"]) or dist.barrier()'
try 0 'done:' env 'ACT=dist.destroy_process_group()' $U cell=a
ends 1 'exchange_timeout_s=5: rank' env "ACT=$a" $U exchange_timeout_s=5 cell=b

## 171 own: recorders that end the process
mkdir -p c/recorder; echo '_target_: r.R' > c/recorder/mine.yaml
cat > r.py <<'E'
class R:
    def start(self, *a, **k): pass
    def log(self, *a, **k): raise SystemExit(3)
    def finish(self, *a, **k): pass
E
try 0 'R is switched off' T1 config_dir=c recorder=mine cell=b; record b status done

## 176 ranks: ranks in unlike surroundings
port=$($PY -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
e="env WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port"
o='PYTHONHASHSEED=1 TZ=Asia/Tokyo LC_ALL=C OMP_NUM_THREADS=2'
$e $o RANK=1 LOCAL_RANK=1 T1 strategy=onebit cell=a > o 2>&1 & p=$!
try 0 'on 2 ranks' $e RANK=0 LOCAL_RANK=0 T1 strategy=onebit cell=a
wait $p; record a status done

## 209 checkpoint: resumed after an edit of the model's file
m <<< "$HEAD"
try 0 'done:' U1 data.size=16 model=m.M checkpoint_every=2 cell=a
rm runs/default/a/record.json; echo '# changed' >> m.py
try 0 '12 steps of 24' U1 data.size=16 model=m.M steps=12 cell=a resume=auto
grep -q '"first_step": 6' runs/default/a/record.json

## 215 network: a stranger who writes to the ports of ranks
T2 steps=1500 cell=a strategy=onebit > o 2>&1 & p=$!
begun a
$PY - $(ranks) <<'E'
import contextlib, glob, os, random, socket, sys
of = set()
for link in (f for pid in sys.argv[1:] for f in glob.glob(f"/proc/{pid}/fd/*")):
    with contextlib.suppress(OSError): of.add(os.readlink(link))
rows = [line.split() for line in open("/proc/net/tcp")][1:]
ports = {int(r[1][-4:], 16) for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in of}
assert ports
for port in ports:
    for noise in (random.Random(1).randbytes(10**6), b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 16):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as s:
            s.sendall(noise)
E
wait $p; record a status done

## 217 network: a host's name that does not resolve
try 0 'on 2 ranks' unshare -u bash -c 'echo nosuch > /proc/sys/kernel/hostname; T2 cell=a'
record a status done

## 218 network: variables of a proxy
u=http://u:pwpwpw99@10.9.9.9:3128
try 0 'on 2 ranks' env http_proxy=$u HTTPS_PROXY=$u ALL_PROXY=$u no_proxy= T2 cell=a
if grep -rq pwpwpw99 runs; then exit 1; fi

## 219 network: an interface that is not there
ends 1 'Unable to find address for: nope' env GLOO_SOCKET_IFNAME=nope T2
try 0 'on 2 ranks' env GLOO_SOCKET_IFNAME= TP_SOCKET_IFNAME=nope T2 cell=b

## 220 network: loopback goes down in the middle of a run
cat > down.sh <<'E'
ip link set lo up
T2 steps=5000000 exchange_timeout_s=5 cell=a > o 2>&1 & p=$!
for _ in {1..300}; do [ -e runs/default/a/attempts.json ] && break; sleep .2; done
sleep 3; ip link set lo down
for _ in {1..60}; do [ -e runs/default/a/record.json ] && break; sleep 1; done
kill -9 $p 2> /dev/null || true
E
unshare -n bash down.sh; for q in $(ranks); do kill -9 $q || true; done
grep -Eq '"status": "(failed|timeout)"' runs/default/a/record.json

## 221 network: four ports for all connections
try 0,1 'of 1 cells done' unshare -n bash -c 'ip link set lo up
  echo "50000 50003" > /proc/sys/net/ipv4/ip_local_port_range
  S study=s strategy=none world_size=2'

## 223 network: a host without IPv6 and with no line in /etc/hosts
try 0 'on 2 ranks' unshare -n -m bash -c 'ip link set lo up; mount --bind /dev/null /etc/hosts
  echo 1 2> /dev/null > /proc/sys/net/ipv6/conf/all/disable_ipv6; T2 cell=a'

## 231 http: the page's word is in the terminal alone
live strategy=none steps=300000
until_true eval 'ls runs/s/*/attempts.json'; sleep 1
w=${u%/}; w=${w##*/}; test ${#w} -ge 20
for q in $(ranks); do
  if cat /proc/$q/cmdline /proc/$q/environ | grep -aqFe "$w"; then exit 1; fi
done
stop_live
if grep -rqFe "$w" runs; then exit 1; fi

## 246 versions: a record in another cell's folder, and a study that is renamed
base; cp runs/s/bd/record.json runs/s/onebit-n2*/record.json
try 2 'is the record of another cell, bd' S study=s strategy=allreduce,onebit world_size=1,2
rm -r runs; base; mv runs/s runs/t
try 0 'would run 0 of 4' S study=t strategy=allreduce,onebit world_size=1,2 dry_run=true

## 250 trackers: curves that are a folder, or a link to a user's file
mkdir -p runs/s/a/curves.csv runs/s/b; echo keep > precious
ln -s "$PWD/precious" runs/s/b/curves.csv
try 0 'done:' T1 recorder=csv study=s cell=a
try 0 'done:' T1 recorder=csv study=s cell=b; grep -qx keep precious

## 251 trackers: a package of a tracker that ends the process
mkdir -p p/tensorboard; echo 'raise SystemExit(0)' > p/tensorboard/__init__.py
try 0 'is switched off' env PYTHONPATH="$PWD/p:${PYTHONPATH-}" T1 recorder=tensorboard cell=b
record b status done

## 264 secrets: the user's name in what is shared
mkdir -p home/alice.smith; cd home/alice.smith; base
try 0 'wrote' env USER=alice.smith LOGNAME=alice.smith L plot runs/s format=svg,pdf,png
try 0 'wrote' env USER=alice.smith LOGNAME=alice.smith L report runs/s
for f in runs/s/report.html runs/s/figures/*.svg runs/s/figures/*.pdf runs/s/figures/*.png; do
  if grep -aqF alice.smith "$f"; then exit 1; fi
done

## 267 launch: a script started by a link, and in its own folder
PATH=$(dirname "$PY"):$PATH; d=$($PY -c 'import lab; print(lab.__path__[0])')/../launch
o="--ranks 1 device=cpu steps=2 data.size=16 model=mlp model.hidden=[8] runs_dir=$PWD/runs"
ln -s "$d/local.sh" l.sh; try 0 'done:' bash l.sh $o cell=a
try 0 'done:' bash -c "cd '$d'; exec bash local.sh $o cell=b"
record a status done; record b status done

## 271 launch: programs of SLURM that fail
mkdir bin; printf '#!/bin/bash\necho 77\n' > bin/sbatch; printf '#!/bin/bash\nexit 1\n' > bin/squeue
chmod +x bin/*; e="PATH=$PWD/bin:$PATH"
try 2 'launcher=slurm: squeue' env "$e" S launcher=slurm study=s strategy=none world_size=1,2
test -z "$(find runs -name record.json)"

## 273 launch: Horovod, where it is not installed
if $PY -c 'import horovod' 2> /dev/null; then exit 0; fi
try 2 'Horovod cannot be imported|make horovod' T1 strategy=horovod
try 2 'make horovod' S study=s strategy=horovod world_size=2

## 274 launch: variables of torchrun with odd values
r="$PY -m lab.distributed.torchrun -m lab.train device=cpu steps=2"
try 2 'lab.distributed.torchrun: error:' env PET_NPROC_PER_NODE=x $r
try 2 'lab.distributed.torchrun: error:' env PET_NNODES=0:0 $r
try 2 'invalid int value' env PET_MASTER_PORT=abc $r

## 300 loop: a certificate that cannot be written ends no training
cat > own.py <<'E'
import os, lab, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(3, 3)
def train(file):
    with lab.grad_sync(model, "onebit", certificate=file) as sync:
        for _ in range(4): model(torch.ones(2, 3)).sum().backward(); sync.finish()
for file in (".", "nodir/x.json"):
    try: train(file)
    except lab.ConfigError as error: print("refused:", error)
    else: raise SystemExit("accepted")
train("/proc/x.json"); print("trained", flush=True); os._exit(0)
E
try 0 'is a folder' $PY own.py; grep -q trained out

## 306 numbers: runs of one and of two steps
for s in 1 2; do
  try 0 'not timed: ' T1 steps=$s cell=s$s
  record s$s samples_per_s None; record s$s num_timed_steps 0
done

## 307 numbers: runs that send nothing
try 0 'nothing to exchange' T1 strategy=onebit cell=a
try 0 'sent +0 MB' T2 strategy=none cell=b

## 309 numbers: fp16 that overflows in each step
m <<< "$HEAD
class N(M):
    def forward(self, x):
        y = super().forward(x)
        return y * torch.tensor(1e38) * 10 if self.training else y"
try 0 'skipped +6 steps' U1 data.size=16 model=m.N precision=fp16 cell=x
record x num_skipped_steps 6

## 313 system: no /proc, no /sys, no shared memory, no list of users
try 0 'on 2 ranks' unshare -m bash -c 'mount -t tmpfs none /proc; T2 cell=a'
try 0 'done:' unshare -m bash -c 'mount -t tmpfs none /sys; T1 cell=b'
try 0 'done:' unshare -m bash -c 'mount --bind /dev/null /etc/passwd; T1 cell=c'
try 0 'on 2 ranks' unshare -m bash -c 'mount -t tmpfs none /dev/shm; T2 cell=d'

## 314 system: a run that is process 1 of a container
T='exec T1 steps=1000000 checkpoint_every=20 cell=a'
unshare -p -f --mount-proc bash -c "$T" > o 2>&1 & u=$!
until_true test -e runs/default/a/checkpoints; sleep 1
kill -TERM $(ranks); code=0; wait $u || code=$?
test $code = 75; record a status interrupted

## 315 system: a source of random numbers that gives zeros
try 0 'live: http' unshare -m bash -c 'mount --bind /dev/zero /dev/urandom
  exec S study=s strategy=none report=live'
if grep -q AAAAAAAAAA out; then exit 1; fi

## 316 system: a locale that is not there
try 0 'done:' env LANG=xx_YY.UTF-8 LC_ALL=xx_YY.UTF-8 LANGUAGE=de T1 cell=a
try 0 'wrote' env LC_NUMERIC=de_DE.UTF-8 L plot runs/default

## 317 system: a host's name of 64 letters
try 2 'has more than 63 characters' unshare -u bash -c \
  'printf h%.0s {1..64} > /proc/sys/kernel/hostname; T2'

## 401 resource: no HOME or TMPDIR, or one that is not there
lives env -u HOME -u XDG_CACHE_HOME T1 $R cell=a
lives env -u XDG_CACHE_HOME HOME=/proc/nowhere T1 $R cell=b
lives env TMPDIR=/proc/nowhere T1 $R cell=c

## 402 resource: no compiler and no git, no locale, no assertions
lives env PATH=/proc/nowhere XDG_CACHE_HOME=cache "$(command -v T1)" $R cell=a
lives env LANG=C LC_ALL=C PYTHONUTF8=0 T1 $R cell=b
lives "$PY" -O -m lab.train device=cpu data.size=16 batch_size=24 $R cell=c

## 403 resource: a path with spaces, 200 characters
d="a b'\"\$é$(printf x%.0s {1..190})"; mkdir "$d"; cd "$d"; lives T1 $R

## 404 resource: 64 files, and shared memory of 64 kB
(ulimit -n 64; lives T2 $R cell=a)
lives unshare -m bash -c "mount -t tmpfs -o size=64k none /dev/shm && exec T2 $R cell=b"

## 405 resource: a network without loopback, and one of IPv6 alone
lives unshare -n T1 $R cell=a
# torchrun resolves localhost, which not every machine's /etc/hosts names in IPv6.
echo "::1 localhost $(hostname)" > hosts
lives unshare -n -m bash -c "ip link set lo up && ip address delete 127.0.0.1/8 dev lo
  mount --bind hosts /etc/hosts && exec T2 $R cell=b"

## 406 resource: not root
lives unshare --user --map-user=65534 --map-group=65534 T2 $R

## 407 resource: a clock that jumps by an hour, back and forth, every second
cc -shared -fPIC -x c - -o clock.so -ldl <<'E'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(which, now);
  if (which == CLOCK_REALTIME && now->tv_sec % 2) now->tv_sec -= 3600;
  return code;
}
E
lives env LD_PRELOAD="$PWD/clock.so" T2 $R

## 408 resource: a machine that is ten times slower
setsid T2 $R cell=a > o 2>&1 & p=$!
while grep -qs ') [^Z]' /proc/$p/stat; do
  kill -STOP -- -$p || true; sleep 0.09; kill -CONT -- -$p || true; sleep 0.01
done 2> /dev/null || true
lives cat o

## 409 resource: a disk that is full, without inodes or read-only
for o in size=1m nr_inodes=12 ro; do
  mkdir -p runs
  lives unshare -m bash -c "mount -t tmpfs -o $o none runs && exec U1 data.size=16 $R"
done

## 410 resource: runs that is a file, leads to nowhere, or goes away
touch runs; lives T1 $R; rm runs
ln -s /proc/nowhere/else runs; lives T1 $R; rm runs
(while [ ! -d runs/default/a/checkpoints ]; do sleep 0.05; done; rm -rf runs) & lives T1 $R cell=a

## 411 resource: output that nobody reads, and none
T1 $R cell=a | head -c 1 > /dev/null || test $? = 141
try 0 '' bash -c "T1 $R cell=b >&-"; record b status done

## 501 twice: one cell
both 1 "T1 $R cell=a" "T1 $R cell=a"
rm -r runs; both 1 "T2 $R cell=a" "T2 $R cell=a"
rm -r runs; both 1 "T1 $R cell=a resume=auto" "T1 $R cell=a resume=auto"

## 502 twice: names by time, one cache of kernels, one port
both 2 "T1 $R" "T1 $R"
rm -r runs; export XDG_CACHE_HOME=cache; both 2 "T1 $R cell=a" "T1 $R cell=b"
port=$($PY -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=$port
rm -r runs; both 1 "T1 $R" "T1 $R"

## 503 twice: one study
G='study=s strategy=allreduce,onebit world_size=1,2'; both 4 "S $G" "S $G"

## 504 twice: a page and figures during a sweep
G='study=s strategy=allreduce,onebit'; both 2 "S $G" "L report runs/s out=page.html"
rm -r runs; both 2 "S $G" "L plot runs/s"

## 505 twice: one page, and one study's figures
base; both 0 "L report runs/s out=page.html" "L report runs/s out=page.html"
both 0 "L plot runs/s format=svg" "L plot runs/s format=svg"

## 506 twice: two clusters
c='cluster=emulated cluster.hosts=2'; both 2 "T1 $c cell=a" "T1 $c cell=b"
