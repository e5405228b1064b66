## 3 fs: a file system that fills while checkpoints are written
mkdir runs
try 0 'bytes are free' unshare -m bash -c 'mount -t tmpfs -o size=900k none runs
  T1 checkpoint_every=1 steps=30 "model.hidden=[256]" cell=a || [ $? = 1 ] &&
  grep -q "\"status\": \"failed\"" runs/default/a/record.json &&
  ls runs/default/a/checkpoints/step_*/DONE'

## 4 fs: a full TMPDIR, with room in the runs' folder
mkdir t
try 0 'done:' unshare -m bash -c 'mount -t tmpfs -o size=4k none t; head -c 4k /dev/zero > t/x
  TMPDIR=$PWD/t T2 cell=a'

## 5 fs: a link that leads to itself as runs_dir
ln -s runs runs
try 2 'Too many levels|no such folder' T1
try 2 'no such folder' L plot runs/s
try 2 'no such folder' L explain runs/a

## 6 fs: cells that are links to another cell, to the parent and to themselves
base; c=$(basename runs/s/onebit-n2*)
ln -s "$c" runs/s/copy; ln -s .. runs/s/up; ln -s self runs/s/self
try 2 'are the same cell' L plot runs/s
rm runs/s/copy; try 0 'wrote' L plot runs/s

## 8 fs: runs_dir in the kernel's file systems and on a device
for d in /proc/self /sys/kernel /dev/null /proc/1/x; do try 2 'runs_dir' T1 runs_dir=$d; done

## 9 fs: runs_dir that is empty, a tilde, or has dots and slashes in it
try 2 'must name a directory' T1 "runs_dir=''"
try 2 'is not a setting' T1 'runs_dir=~'
try 0 'done:' T1 runs_dir=a/../b cell=c; test -e b/default/c/record.json
try 0 'done:' T1 runs_dir=a//b/ cell=c; test -e a/b/default/c/record.json
test ! -e '~'

## 11 fs: a study's saved grid that cannot be read
base; rm runs/s/study.json; mkdir runs/s/study.json
try 2 'study.json: cannot be read' L sweep study=s

## 16 fs: a build folder that others can write to is not used
mkdir t; mkdir -m 777 "t/scaling-lab-$(id -u)"
try 0 'done:' env XDG_CACHE_HOME=/proc/x TMPDIR="$PWD/t" T2 strategy=onebit
test -z "$(ls -A t/scaling-lab-*)"

## 18 fs: files of the user that look temporary stay
base; mkdir runs/s/figures
f=(.notes.tmp summary.csv.tmp .summary.csv.old ".summary.csv.$(uname -n)-x")
for each in "${f[@]}"; do touch "runs/s/figures/$each" "runs/s/$each"; done
try 0 'wrote' L plot runs/s
for each in "${f[@]}"; do test -e "runs/s/figures/$each"; test -e "runs/s/$each"; done

## 19 fs: a folder where a record should be, and a file where figures should be
base; c=$(echo runs/s/onebit-n2*); rm "$c/record.json"; mkdir "$c/record.json"
try 0 'missing: onebit-n2' L plot runs/s
rm -r runs/s/figures; touch runs/s/figures
try 2 'figures' L plot runs/s

## 21 names: cells whose names are paths or words of a shell
for n in .. a/b ' ' '$(touch x)' '*'; do try 2 'names a directory' T1 "cell='$n'"; done
try 2 'names a directory' T1 "study='../x'"
test ! -e x; try 0 'default/007/record.json' T1 "cell='007'"

## 22 names: cells called as files and folders of a study
for n in figures study.json report.html; do try 2 "cell='$n': names a" T1 cell=$n; done
test ! -e runs

## 23 names: more letters than a file's name may have bytes
try 2 'is not a setting|names a directory' T1 "cell=$(printf 'é%.0s' {1..128})"
test ! -e runs

## 24 names: one name in two ways of Unicode
base; c=$(echo runs/s/onebit-n2*)
mv "$c" $'runs/s/caf\xc3\xa9'; cp -r $'runs/s/caf\xc3\xa9' $'runs/s/cafe\xcc\x81'
try 2 'are the same cell' L plot runs/s

## 25 names: names made of very long settings
try 0 'done:' T1 "model.hidden=[$(seq -s, 1 40)]"
for d in runs/default/*; do n=${d##*/}; test ${#n} -lt 200; done
try 0 'would run 3 of 3' S study=s strategy=none 'model.hidden=[8],[8,8],[8,8,8]' dry_run=true

## 26 names: values of a list that are equal, or almost
try 2 'listed twice' S study=s strategy=onebit optim.lr=0.01,1e-2 dry_run=true
try 0 'would run 2 of 2' S study=s strategy=onebit optim.lr=0.01,0.010000001 dry_run=true

## 27 names: one cell's name for a grid
try 2 'a sweep sets this itself' S study=s cell=a strategy=none,onebit
test ! -e runs

## 28 names: bytes that are no UTF-8
try 2 'is not a setting|names a directory' T1 $'cell=\xff\xfe'
test ! -e runs

## 29 names: repeats that are negative, fractions or too large
for v in -1 1.5 true 99999999999999999999; do try 2 "repeat=$v" T1 repeat=$v; done
test ! -e runs; try 0 'done:' T1 repeat=1 cell=b

## 30 names: studies that begin with a dash or contain an equals sign
base; mv runs/s ./-s; try 0 'wrote' L plot ./-s
try 2 'flags are' L plot -s
mv ./-s a=b; try 2 'expected at least one STUDY' L plot a=b
try 0 'wrote x=y.html' L report ./a=b out=x=y.html

## 31 env: output in ASCII alone
base; try 0 'record  .*record.json' env PYTHONIOENCODING=ascii T1 steps=4 cell=a
try 0,1 'kim2017|Kim' env PYTHONIOENCODING=ascii:strict LC_ALL=C L verify kim2017
try 0 'lab.explain' env PYTHONIOENCODING=ascii:strict LC_ALL=C L explain runs/s

## 36 env: a user who is called as a strategy
base; try 0 'wrote' L report runs/s out=n.html
try 0 'wrote' env USER=allreduce LOGNAME=allreduce L report runs/s out=q.html
test "$(grep -o allreduce n.html | wc -l)" = "$(grep -o allreduce q.html | wc -l)"

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

## 40 env: variables of SLURM that are left over
e='SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NODEID=0'
try 0 'on 1 rank' env $e SLURM_PROCID=0 T1 exchange_timeout_s=5 cell=a
try 0 'on 1 rank' env SLURM_JOB_ID=7 SLURM_PROCID=abc SLURM_STEP_ID=batch T1 cell=b

## 41 env: RANK and WORLD_SIZE that are left over
try 2 'WORLD_SIZE=0: must be a number' env RANK=0 WORLD_SIZE=0 T1
e='WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511'
try 2 'RANK=5: must be a number from 0 to 1' env RANK=5 $e T1 exchange_timeout_s=5
try 2 'LOCAL_WORLD_SIZE=: must be' env RANK=0 WORLD_SIZE=1 T1
try 0 'on 1 rank' env OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 T1 cell=a

## 44 env: a variable that turns off safe loading, and a checkpoint that holds code
try 0 'done:' T1 cell=a checkpoint_every=2; K=runs/default/a/checkpoints/step_000006
$PY - $K <<'E'
import hashlib, json, os, pathlib, sys, torch
class Act:
    def __reduce__(self): return os.mkdir, ("ran",)
d = pathlib.Path(sys.argv[1]); torch.save({"model": Act()}, d / "shared.pt")
data, done = (d / "shared.pt").read_bytes(), json.loads((d / "DONE").read_text())
done["files"]["shared.pt"] = hashlib.sha256(data).hexdigest()
done["sizes"]["shared.pt"] = len(data); (d / "DONE").write_text(json.dumps(done))
E
try 2 'more than tensors' env TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 T1 cell=b resume=$K
test ! -e ran

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

## 50 cwd: packages' names in the current folder
mkdir hydra torch; touch hydra/__init__.py torch/__init__.py; echo > omegaconf.py; echo > numpy.py
try 0 'done:' T1
try 0 'wrote' L plot runs/default

## 51 cwd: folders called lab and conf, and a file lab.py, in the current folder
mkdir lab; try 0 'done:' T1 cell=a; rmdir lab
mkdir -p conf/strategy; echo 'strategy: evil' > conf/strategy/onebit.yaml
try 0 'strategy=onebit' T1 strategy=onebit cell=b
echo 'x = 1' > lab.py; try 1 'lab' T1 cell=c

## 52 cwd: commands started in a stranger's study that holds modules
base; cd runs/s
for f in numpy json altair pyarrow; do echo 'open("ran", "w")' > $f.py; done
try 0 'wrote' L plot .
try 0 'wrote' L report . out=../p.html
try 0 'lab.explain' L explain .
test ! -e ran

## 53 cwd: modules beside a stranger's profile
d=$($PY -c 'import lab; print(lab.__path__[0])')/..
mkdir x; cp "$d/conf/profile/alexnet_titanx.yaml" x
for f in numpy torch yaml; do echo 'open("ran", "w")' > x/$f.py; done
try 0 'predicted' L predict profile=x/alexnet_titanx.yaml strategy=tree world_size=2
test ! -e ran

## 54 cwd: a current folder that has been removed
try 1,2 'No such file' bash -c 'mkdir d; cd d; rmdir ../d; exec T1'

## 58 limits: files of 64 KiB at most
(ulimit -f 64; try 1 'cannot be written' T1 'model.hidden=[256]' checkpoint_every=2 cell=a)
record a status failed
if ls runs/default/a/checkpoints/*/DONE > /dev/null 2>&1; then exit 1; fi

## 62 limits: settings nested 500 deep
try 2 'nested too deeply' T1 "model.hidden=$(printf '[%.0s' {1..500})8$(printf ']%.0s' {1..500})"
test ! -e runs

## 66 streams: standard streams that are closed from the start
try 0 'rc=0' bash -c 'T1 cell=a <&- >&- 2>&-; echo rc=$?'
try 0 'rc=0' bash -c 'T2 cell=b <&- >&- 2>&-; echo rc=$?'
record a status done; record b status done
for f in $(find runs -name '*.json'); do $PY -m json.tool "$f" > /dev/null; done

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

## 74 signals: SIGHUP, as of a terminal that closes, to a run
env --default-signal=HUP T1 steps=1000000 checkpoint_every=20 cell=a > o 2>&1 & p=$!
until_true test -e runs/default/a/checkpoints; sleep 1
kill -HUP $p; code=0; wait $p || code=$?
test $code = 75; record a status interrupted

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
code=0; timeout 120 $PY -c 'import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execvp("T2", ["T2", "steps=-1"])' > out 2>&1 || code=$?
test $code = 1; grep -q 'steps=-1: must be' out

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

## 81 signals: a run that is stopped for a while and continued
T1 steps=8000 cell=a > o 2>&1 & p=$!
begun a; kill -STOP $p; sleep 4; kill -CONT $p
wait $p; record a status done

## 82 signals: SIGTERM at several moments of a short run
for t in 2.5 3 3.5 4; do
  T1 steps=60 cell=t$t > o 2>&1 & p=$!
  sleep $t; kill -TERM $p 2> /dev/null || true; code=0; wait $p || code=$?
  case $code in
    0) record t$t status done ;;
    75) record t$t status interrupted ;;
    1 | 143) ;;
    *) exit 1 ;;
  esac
done

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

## 88 races: a model's file is edited while its import is slow
m <<E
import time
open("sleeping", "w").close(); time.sleep(6)
$HEAD
E
h=$(sha256sum m.py | cut -c1-8); U1 data.size=16 model=m.M cell=a steps=3 > o 2>&1 & p=$!
until_true test -e sleeping; echo '# other' >> m.py
wait $p; grep -q "\"$h\"" runs/default/a/record.json

## 91 races: the same cell again, with other settings
try 0 'done:' T1 cell=a; cp runs/default/a/record.json r
try 2 'already holds a record' T1 cell=a optim.lr=0.5
try 2 'already holds a record' T1 cell=a steps=12 resume=auto
cmp r runs/default/a/record.json

## 92 races: a lock that is a link to a user's file, or a pipe
mkdir -p runs/default/a runs/default/b runs/s; echo keep > precious
ln -s ../../../precious runs/default/a/.lock
try 2 'runs_dir: cannot write' T1 cell=a; grep -qx keep precious
mkfifo runs/default/b/.lock runs/s/.lock; try 0 'done:' T1 cell=b
try 0 '1 of 1 cells done' S study=s strategy=none

## 93 races: links under the names that a sweep and a page will write
echo keep > precious; mkdir -p runs/s; ln -s "$PWD/precious" runs/s/study.json
try 2 "not a list of a study's grids" S study=s strategy=none
rm runs/s/study.json; ln -s "$PWD/precious" runs/s/report.html
try 0 '1 of 1 cells done' S study=s strategy=none
try 0 'wrote' L report runs/s; grep -qx keep precious

## 95 races: two sweeps of one study at once
S study=s strategy=none,onebit > o 2>&1 & p=$!
until_true test -e runs/s/study.json
try 0 '1 of 1 cells done' S study=s strategy=tree
wait $p; grep -q '2 of 2 cells done' o; test "$(grep -c '"when"' runs/s/study.json)" = 2

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
try 2 'this run ends at 6' T1 cell=a runs_dir=runs2 resume=auto
kill -TERM $p; code=0; wait $p || code=$?; test $code = 75; record a status interrupted

## 99 values: steps that no run can have
for v in 0 -1 1.5 nan 99999999999999999999; do try 2 "steps=$v" T1 steps=$v; done
try 2 'set only one of the two' T1 steps=6 epochs=2
test ! -e runs

## 100 values: batches that no run can have
for v in 0 24.5 nan 9223372036854775808; do try 2 "batch_size=$v" T1 batch_size=$v; done
try 2 'multiple of 3' T1 batch_size=7 accumulate=3
test ! -e runs

## 101 values: sizes of buckets
for v in nan inf -1 true; do try 2 "bucket_mb=$v" T1 bucket_mb=$v overlap=true; done
test ! -e runs

## 102 values: limits of an exchange's time
for v in 0 nan inf 1e20 1h; do try 2 'exchange_timeout_s=' T1 exchange_timeout_s=$v; done
test ! -e runs

## 103 values: seeds
for v in -1 0.5 nan 18446744073709551616 abc; do try 2 "seed=$v" T1 seed=$v; done
try 0 'done:' T1 seed=4294967296 strategy=randomk

## 105 values: counters below zero, and a warm-up of more steps than there are
for k in eval_every checkpoint_every drift_every warmup_steps threads; do
  try 2 "$k=-1: must be" T1 $k=-1
done
try 0 'none was timed' T1 warmup_steps=1000

## 106 values: words that are neither true nor false
for v in t tru maybe; do try 2 'must be true or false' T1 overlap=$v; done
try 0 'done:' T1 deterministic=no cell=a

## 107 values: choices in other letters
try 2 'precision=FP32: allowed:' T1 precision=FP32
try 2 'did you mean onebit' T1 strategy=Onebit
try 2 'scaling=STRONG: allowed:' T1 scaling=STRONG
try 2 'device=mps: allowed:' T1 device=mps
try 2 'backend=mpi: allowed:' T1 backend=mpi

## 109 values: norms to clip gradients to
for v in 0 -1 nan inf true; do try 2 'clip_grad_norm=' T1 clip_grad_norm=$v; done
try 0 'done:' T1 clip_grad_norm=1e300

## 110 values: rates and hosts of an emulated cluster, delays of a straggler
for r in 0mbit 1 1e99gbit nanmbit; do
  try 2 "cluster.rate=$r: must be" T1 cluster=emulated cluster.hosts=2 cluster.rate=$r
done
for h in 0 1000 1.5; do try 2 'from 1 to 150' T1 cluster=emulated cluster.hosts=$h; done
try 2 'straggler.delay_ms=nan' T1 straggler=planted straggler.delay_ms=nan

## 111 values: shapes of models and data
for v in '[0]' '[8.5]' 8 "['8']"; do try 2 'must be a list of integers' T1 "model.hidden=$v"; done
try 2 'data.shape=.*must be' U1 data=synthetic 'data.shape=[3,32]'
try 2 'data.size=0: must be an integer of at least 8' T1 data.size=0
try 2 'model=lenet: images of 8x8 px are too small' U1 model=lenet data.size=8

## 112 values: numbers of ranks
for v in 0 nan true 1,1; do
  try 2 "world_size=$v" S study=w dry_run=true strategy=none world_size=$v
done
try 2 'world_size=0' L predict strategy=tree world_size=0
try 2 'world_size=0' L advise world_size=0

## 114 values: letters that look like others, and ones that are not seen
try 2 'is not a setting' T1 $'b\xd0\xb0tch_size=24'
try 2 'is not a setting' T1 $'seed=\xe2\x88\x921'
try 2 'u200b' T1 $'batch_size=24\xe2\x80\x8b'
try 2 'u202e' T1 $'cell=a\xe2\x80\xaeb'

## 115 grammar: settings that are added, forced and removed
try 2 'nothing reads this setting' T1 +foo=1
try 2 'a run needs it' T1 '~strategy'
try 2 'Hydra itself has no settings' T1 +hydra.x=1
try 0 'steps of 48' T1 ++batch_size=48

## 116 grammar: broken words
for w in strategy 'cell="abc' 'cell=[a' 'cell=${' optim..lr=1; do
  try 2 'is not a setting' T1 "$w"
done
try 2 'flags are' T1 --
try 2 'write batch_size=3' T1 --batch_size=3
try 2 'strategy==onebit: no such setting; allowed: out' L plot runs/s strategy==onebit

## 117 grammar: the same setting twice
try 0 'steps of 48' T1 batch_size=48
try 2 'batch_size=nan: must be an integer' L train device=cpu batch_size=24 batch_size=nan
try 0 'strategy=onebit' T1 strategy=tree strategy=onebit cell=b

## 118 grammar: references to other settings and to variables
try 2 'no secret' env MY_API_TOKEN=correct-horse T1 'cell=${oc.env:MY_API_TOKEN}'
try 2 'no secret' env MY_API_TOKEN=correct-horse T1 'study=${oc.env:MY_API_TOKEN}'
if grep -rq correct-horse .; then exit 1; fi
try 2 'Recursive interpolation' T1 'batch_size=${batch_size}'
try 2 "'nope' not found" T1 'cell=${nope}'
try 2 "'NOPE' not found" T1 'cell=${oc.env:NOPE}'

## 125 data: a class label of a billion, and larger ones
for v in '10**9' '2**40' '2**63-1'; do
  $PY -c "import numpy as np
np.savez('d.npz', inputs=np.random.rand(100, 4), targets=np.array([0] * 99 + [$v]))"
  try 2 'integers up to' U1 model=mlp 'model.hidden=[8]' data=arrays data.path=d.npz
done

## 126 data: labels below zero, and labels that begin at one
npz() { $PY -c "import numpy as np; np.savez('d.npz', **dict($1))"; }
U='U1 model=mlp model.hidden=[8] data=arrays data.path=d.npz'
npz 'inputs=np.random.rand(100, 4), targets=np.arange(100) % 3 - 1'
try 2 'must be at least 0' $U
npz 'inputs=np.random.rand(100, 4), targets=np.where(np.arange(100) % 3, 1, -100)'
try 2 'integers from -100' $U
npz 'inputs=np.random.rand(100, 4), targets=np.arange(100) % 3 + 1'
try 0 'done:' $U

## 127 data: numbers beyond float32, and labels that are no integers
npz() { $PY -c "import numpy as np; np.savez('d.npz', **dict($1))"; }
U='U1 model=mlp model.hidden=[8] data=arrays data.path=d.npz'
npz 'inputs=np.full((100, 4), 1e300), targets=np.arange(100) % 2'
try 2 'inputs are beyond the range of float32' $U
npz 'inputs=np.random.rand(100, 4), targets=np.full(100, 1e200)'
try 2 'targets are beyond the range of float32' $U task=regression
npz 'inputs=np.random.rand(100, 4), targets=(np.arange(100) % 2).astype(float)'
try 2 'must be class indices' $U

## 128 data: types of arrays
npz() { $PY -c "import numpy as np; np.savez('d.npz', **dict($1))"; }
U='U1 model=mlp model.hidden=[8] data=arrays data.path=d.npz'
for t in c8 'M8[s]' U3; do
  npz "inputs=np.ones((100, 4)).astype('$t'), targets=np.arange(100) % 2"
  try 2 'must be numbers' $U
done
npz "inputs=np.ones((100, 4)).astype('O'), targets=np.arange(100) % 2"; try 2 'cannot be read' $U
npz "inputs=np.ones((100, 4)).astype('>f4'), targets=np.arange(100) % 2"; try 0 'done:' $U

## 129 data: shapes of arrays
npz() { $PY -c "import numpy as np; np.savez('d.npz', **dict($1))"; }
U='U1 model=mlp model.hidden=[8] data=arrays data.path=d.npz'
for s in 'np.array(3.), targets=np.array(1)' 'np.ones((0, 4)), targets=np.ones(0, int)' \
  'np.ones((100, 4)), targets=np.arange(99) % 2'; do
  npz "inputs=$s"; try 2 'of each part at least one' $U
done
npz 'inputs=np.asfortranarray(np.random.rand(100, 4)), targets=np.arange(100) % 2'
try 0 'done:' $U

## 130 data: shares of samples to test on
$PY -c "import numpy as np
np.savez('d.npz', inputs=np.random.rand(100, 4), targets=np.arange(100) % 2)"
U='U1 model=mlp model.hidden=[8] data=arrays data.path=d.npz'
for v in 0 1 -1 nan; do try 2 "data.test_share=$v: must be" $U data.test_share=$v; done
try 2 'of each part at least one' $U data.test_share=1e-9

## 131 data: names of arrays that are not there, and one that nobody asked for
npz() { $PY -c "import numpy as np; np.savez('d.npz', **dict($1))"; }
U='U1 model=mlp model.hidden=[8] data=arrays data.path=d.npz'
npz 'Inputs=np.random.rand(100, 4), Targets=np.arange(100) % 2'; try 2 'no such array' $U
try 2 'no such array' $U data.inputs=nope data.targets=Targets
try 0 'done:' $U data.inputs=Inputs data.targets=Targets
npz 'inputs=np.ones((100, 4)), targets=np.arange(100) % 2, junk=np.array([object()])'
try 2 'cannot be read' $U

## 132 data: columns of a table
$PY -c "import pyarrow as pa, pyarrow.parquet as q
x, y = [i / 100 for i in range(100)], [i % 2 for i in range(100)]
q.write_table(pa.table({'a': x, 'b': ['x'] * 100, 'y': y}), 't.parquet')"
U='U1 model=mlp model.hidden=[8] data=arrays data.path=t.parquet data.targets=y'
for i in '[a,a]' '[a,y]'; do try 2 'named twice, or is the target' $U "data.inputs=$i"; done
try 2 'column b holds string, not numbers' $U
try 2 'no such column' $U 'data.inputs=[nope]'

## 133 data: outputs that would be spread over targets of another shape
m <<'E'
from torch import nn
class A(nn.Module):
    def __init__(self, input_shape, output_size):
        super().__init__(); self.f = nn.Linear(4, 1)
    def forward(self, x): return self.f(x.flatten(1)).squeeze(-1)
class B(A):
    def forward(self, x): return self.f(x.flatten(1))
E
$PY -c "import numpy as np
np.savez('d.npz', inputs=np.random.rand(100, 4), targets=np.random.rand(100))"
try 2 'must be floating-point \[batch, 1\]' U1 model=m.A data=arrays data.path=d.npz task=regression
try 0 'done:' U1 model=m.B data=arrays data.path=d.npz task=regression

## 137 data: folders of classes that differ between training and test
$PY - <<'E'
import pathlib
from PIL import Image
for root, label in (("same", "dog"), ("other", "Cat")):
    for part in ("train/cat", "train/dog", f"test/{label}"):
        d = pathlib.Path(root, part); d.mkdir(parents=True)
        for i in range(8): Image.new("RGB", (16, 16), (9 * i, 9, 9)).save(d / f"{i}.png")
E
U='U1 data=imagefolder data.size=16 data.workers=0 model=mlp model.hidden=[8] steps=2 batch_size=8'
try 0 'done:' $U data.path=same
try 2 'no images in train/ for Cat, a class in test/' $U data.path=other

## 140 data: samples that are all equal
$PY -c "import numpy as np
np.savez('d.npz', inputs=np.ones((100, 4)), targets=np.zeros(100, int))"
for s in onebit powersgd; do
  try 0 'done:' U2 model=mlp 'model.hidden=[8]' data=arrays data.path=d.npz strategy=$s cell=$s
  record $s status done
done

## 142 model: a model that writes bytes to standard output
m <<< "import os, sys, time; $HEAD
class N(M):
    def forward(self, x):
        os.write(1, b'\xff\xfe\x1b[2J\r' * 100)
        return super().forward(x)"
try 0 'done:' U1 data.size=16 model=m.N cell=a; record a status done
try 0 'done:' U2 data.size=16 model=m.N cell=b; record b status done

## 143 model: a model that ends the process with a good exit code
ends() { code=0; timeout 120 "${@:2}" > out 2>&1 || code=$?; test $code = "$1"; }
m <<< "import os, sys; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: exec(os.environ['ACT'])
        return super().forward(x)"
ends 1 env 'ACT=sys.exit(0)' U1 data.size=16 model=m.N cell=a; record a status failed
try 1 '0 of 1 cells done' env 'ACT=os._exit(0)' L sweep study=w device=cpu steps=6 batch_size=24 \
  threads=1 data.size=16 model=m.N strategy=none
echo 'import sys; sys.exit(0)' > q.py; ends 2 U1 data.size=16 model=q.M
grep -q 'cannot be imported' out

## 144 model: exceptions that are no errors
ends() { code=0; timeout 120 "${@:2}" > out 2>&1 || code=$?; test $code = "$1"; }
m <<< "import os; $HEAD
class Rude(BaseException): pass
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: raise eval(os.environ['KIND'])
        return super().forward(x)"
for k in Rude GeneratorExit; do
  ends 1 env KIND=$k U1 data.size=16 model=m.N cell=$k; record $k status failed
done
ends 1 env KIND=MemoryError U1 data.size=16 model=m.N cell=m; record m status oom

## 145 model: errors without a text, or with one that no file holds
ends() { code=0; timeout 120 "${@:2}" > out 2>&1 || code=$?; test $code = "$1"; }
m <<< "import os; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: raise eval(os.environ['KIND'])
        return super().forward(x)"
k='type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})()'
ends 1 env "KIND=$k" U1 data.size=16 model=m.N cell=a; record a status failed
grep -q 'its text cannot be read' runs/default/a/record.json
ends 1 env 'KIND=ValueError("\x1b]0;x\x07\ud800")' U1 data.size=16 model=m.N cell=b
record b status failed; try 0 'done:' T1 cell=c; try 0 'wrote' L report runs/default

## 146 model: a process that a model leaves behind
m <<< "import os, time; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: os.fork() or (time.sleep(20), os._exit(0))
        return super().forward(x)"
try 0 'done:' U1 data.size=16 model=m.N cell=a; record a status done
for q in $(ranks); do kill -9 $q || true; done

## 148 model: a model that changes the current folder
m <<< "import os; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: os.chdir('/')
        return super().forward(x)"
try 0 'done:' U1 data.size=16 model=m.N cell=a checkpoint_every=2 recorder=csv
test -e runs/default/a/curves.csv; test -e runs/default/a/checkpoints/step_000006/DONE
echo 'import os; os.chdir("/"); from m import M' > q.py
try 0 'done:' U1 data.size=16 model=q.M cell=b; test -e runs/default/b/record.json

## 149 model: a model that changes variables of the environment
m <<< "import os; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        new = dict(MASTER_PORT='1', RANK='7', WORLD_SIZE='9', PATH='', HOME='/x')
        if N.calls == 5: os.environ.update(new)
        return super().forward(x)"
try 0 'on 2 ranks' U2 data.size=16 model=m.N cell=a strategy=onebit; record a status done

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
m <<< "import os; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: exec(os.environ['ACT'])
        return super().forward(x)"
U='U1 data.size=16 model=m.N'
try 0 'done:' env 'ACT=torch.set_default_dtype(torch.float64)' $U cell=a
try 1 'does not require grad' env 'ACT=torch.set_grad_enabled(False)' $U cell=b
record b status failed

## 152 model: a model that sets an alarm, whose signal ends its ranks
m <<< "import signal; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: signal.alarm(1)
        return super().forward(x)"
code=0; timeout 120 U2 data.size=16 model=m.N steps=200000 > out 2>&1 || code=$?
test $code = 1; grep -q SIGALRM out; test -z "$(ranks)"

## 153 model: a model that takes standard output or the clock away
m <<< "import os, sys, time; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: exec(os.environ['ACT'])
        return super().forward(x)"
try 0 '' env 'ACT=sys.stdout = None' U1 data.size=16 model=m.N cell=a; record a status done
try 0 '' env 'ACT=time.time = lambda: 0.0' U1 data.size=16 model=m.N cell=b; record b status done

## 155 model: a model that makes collective calls of its own
m <<< "import os, torch.distributed as dist; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5: exec(os.environ['ACT'])
        return super().forward(x)"
U='U2 data.size=16 model=m.N strategy=onebit'
try 0 'done:' env 'ACT=dist.destroy_process_group()' $U cell=a
a='int(os.environ["RANK"]) or dist.barrier()'; code=0
timeout 120 env "ACT=$a" $U exchange_timeout_s=5 cell=b > out 2>&1 || code=$?
test $code = 1; grep -q 'exchange_timeout_s=5: rank' out

## 156 model: a model that has another layer on rank 1
m <<< "import os; $HEAD
class N(M):
    def __init__(self, image_shape, num_classes):
        super().__init__(image_shape, num_classes)
        if os.environ['RANK'] == '1': self.extra = nn.Linear(3, 3)"
code=0; timeout 120 U2 data.size=16 model=m.N > out 2>&1 || code=$?
test $code = 1; grep -q 'number of parameters: 2 on rank 0, 4 on rank 1' out

## 157 model: outputs that are no tensor, or of other samples
m <<< "import os; $HEAD
class N(M):
    def forward(self, x):
        y = super().forward(x); return eval(os.environ['GIVES'])"
for g in None '(y,)' '{1: y}'; do
  try 2 'it must return a tensor' env "GIVES=$g" U1 data.size=16 model=m.N
done
try 1 'Expected input batch_size' env 'GIVES=y[:1]' U1 data.size=16 model=m.N cell=a

## 158 model: a model that changes its weights on rank 1
m <<< "import os; $HEAD
class N(M):
    calls = 0
    def forward(self, x):
        N.calls += 1
        if N.calls == 5 and os.environ['RANK'] == '1': self.f.weight.data.add_(1)
        return super().forward(x)"
code=0; timeout 120 U2 data.size=16 model=m.N strategy=onebit cell=a > out 2>&1 || code=$?
test $code = 1; grep -q 'replicas differ: f.weight' out; record a status failed

## 162 model: outputs that are constant
m <<< "$HEAD
class N(M):
    def forward(self, x):
        return super().forward(x) * 0"
try 0 'done:' U2 data.size=16 model=m.N strategy=onebit cell=a; record a status done

## 166 own: functions of data that return something else
cat > d.py <<'E'
import os, torch
def data(seed):
    x, y = torch.rand(100, 1, 8, 8), torch.arange(100) % 10
    return eval(os.environ["GIVES"])
E
U='U1 data=d.data model=mlp model.hidden=[8]'
for g in None '(x, y[:99])' 'iter([(x, y)])' '(x, y.tolist())'; do
  try 2 'it must be \(inputs, targets\)' env "GIVES=$g" $U
done
try 2 'must be class indices' env 'GIVES=(x, y.double())' $U

## 167 own: data that are random anew on each rank
cat > d.py <<'E'
import os, torch
def data(seed):
    own = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
    return torch.rand(100, 1, 8, 8, generator=own), torch.arange(100) % 10
E
code=0; timeout 120 U2 data=d.data model=mlp 'model.hidden=[8]' > out 2>&1 || code=$?
test $code = 1; grep -q 'samples (digest): .*must be equal on all ranks' out

## 168 own: data that take long on rank 1
cat > d.py <<'E'
import os, time, torch
def data(seed):
    if os.environ["RANK"] == "1": time.sleep(40)
    x = torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(100) % 10
E
U='U2 data=d.data model=mlp model.hidden=[8]'
code=0; timeout 120 $U exchange_timeout_s=5 > out 2>&1 || code=$?
test $code = 1; grep -q 'rank 1 is outside any exchange' out

## 169 own: losses that are no mean
cat > l.py <<'E'
import os
from torch.nn.functional import cross_entropy
def loss(outputs, targets):
    value = cross_entropy(outputs, targets, reduction="none")
    return eval(os.environ["GIVES"])
E
try 1 'it must return one number' env GIVES=value T1 task=l.loss cell=a
try 1 'it must return one number' env 'GIVES=value.mean().item()' T1 task=l.loss cell=b
try 1 'does not require grad' env 'GIVES=value.mean().detach()' T1 task=l.loss cell=c

## 170 own: optimizers that ranks cannot use together
try 2 'evaluates the loss several times' T1 optim=torch.optim.LBFGS optim.lr=0.01
try 2 'takes only sparse gradients' T1 optim=torch.optim.SparseAdam optim.lr=0.01
try 2 'optim' T1 optim=torch.optim.Optimizer optim.lr=0.01
test ! -e runs/default/*/record.json

## 171 own: recorders that fail or end the process
mkdir -p c/recorder; echo '_target_: r.R' > c/recorder/mine.yaml
cat > r.py <<'E'
import os
class R:
    def start(self, *a, **k): pass
    def log(self, *a, **k): exec(os.environ["ACT"])
    def finish(self, *a, **k): pass
E
try 0 'R is off' env 'ACT=raise ValueError("x")' T1 config_dir=c recorder=mine cell=a
try 0 'R is off' env 'ACT=raise SystemExit(3)' T1 config_dir=c recorder=mine cell=b
record a status done; record b status done

## 174 own: packages that are not installed, and modules without the name
try 2 'no module nosuchpackage in' U1 data.size=16 model=nosuchpackage.models.X
try 2 'this has no M' U1 data.size=16 model=this.M
echo 'import nosuchpackage' > inner.py; code=0
timeout 120 U1 data.size=16 model=inner.M > out 2>&1 || code=$?
test $code = 2; grep -q 'cannot be imported: inner.py:1' out

## 175 ranks: a setting that one rank has differently
port() { $PY -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])'; }
for k in seed=1 steps=7 measure=breakdown; do
  e="env WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$(port)"
  $e RANK=1 LOCAL_RANK=1 T1 $k > o 2>&1 & p=$!
  try 2 "${k%=*}: .*must be equal on all ranks" $e RANK=0 LOCAL_RANK=0 T1
  code=0; wait $p || code=$?; test $code = 2
done
test ! -e runs

## 176 ranks: ranks in unlike surroundings
port=$($PY -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
e="env WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port"
o='PYTHONHASHSEED=1 TZ=Asia/Tokyo LC_ALL=C OMP_NUM_THREADS=2'
$e $o RANK=1 LOCAL_RANK=1 T1 strategy=onebit cell=a > o 2>&1 & p=$!
try 0 'on 2 ranks' $e RANK=0 LOCAL_RANK=0 T1 strategy=onebit cell=a
wait $p; record a status done

## 180 ranks: a rank of another study on the same port
port=$($PY -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
e="env WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port"
$e RANK=1 LOCAL_RANK=1 T1 study=b > o 2>&1 & p=$!
try 2 'study: a on rank 0, b on rank 1' $e RANK=0 LOCAL_RANK=0 T1 study=a
code=0; wait $p || code=$?; test $code = 2; test ! -e runs

## 192 formats: a record whose number of ranks is a text
base; sed -i '0,/"world_size": 2/s//"world_size": "2"/' runs/s/onebit-n2*/record.json
try 0 "missing: .*world_size='2'" L plot runs/s

## 202 checkpoint: other things among the checkpoints
try 0 'done:' T1 cell=a checkpoint_every=2; C=runs/default/a/checkpoints
rm runs/default/a/record.json; mkdir $C/step_999999 $C/step_abc $C/step_000080
mkfifo $C/step_000080/DONE; touch $C/step_000099; cp -r $C/step_000004 $C/step_000004.bak
try 0 '12 steps of 24' T1 steps=12 cell=a resume=auto checkpoint_every=2
grep -q '"first_step": 6' runs/default/a/record.json
for n in step_999999 step_abc step_000080/DONE step_000099 step_000004.bak; do test -e $C/$n; done

## 203 checkpoint: a checkpoint of another run
try 0 'done:' T1 cell=a checkpoint_every=2; C=runs/default/a/checkpoints
try 2 'is of another model' T1 cell=b data.size=8 resume=$C/step_000004
try 2 'is at step 6, this run ends at 4' T1 cell=b steps=4 resume=$C/step_000006
o='optim=torch.optim.Adam optim.lr=0.01'
try 2 'holds the state of torch.optim.SGD' T1 cell=b $o resume=$C/step_000004
try 0 'done:' T1 cell=b seed=5 resume=$C/step_000004

## 204 checkpoint: paths that are no checkpoint
try 0 'done:' T1 cell=a checkpoint_every=2; d=runs/default/a
for r in $d $d/checkpoints $d/checkpoints/step_000004/shared.pt nope Auto; do
  try 2 'not a complete checkpoint' T1 cell=b resume=$r
done

## 205 checkpoint: a checkpoint that was edited and sealed anew
try 0 'done:' T1 cell=a checkpoint_every=2; K=runs/default/a/checkpoints/step_000004
cat > edit.py <<'E'
import hashlib, json, pathlib, sys, torch
d = pathlib.Path(sys.argv[1]); state = torch.load(d / "shared.pt", weights_only=True)
exec(sys.argv[2]); torch.save(state, d / "shared.pt")
data, done = (d / "shared.pt").read_bytes(), json.loads((d / "DONE").read_text())
done["files"]["shared.pt"] = hashlib.sha256(data).hexdigest()
done["sizes"]["shared.pt"] = len(data); (d / "DONE").write_text(json.dumps(done))
E
for s in -5 '"7"' 'float("nan")'; do
  $PY edit.py $K "state['progress']['step'] = $s"
  try 2 'must be integers of at least 0' T1 cell=b resume=$K
done
$PY edit.py $K 'del state["progress"]'; try 2 "not a checkpoint of a run" T1 cell=b resume=$K

## 206 checkpoint: resumed under another strategy, and on fewer ranks
try 0 'done:' T2 cell=a checkpoint_every=3 strategy=onebit
K=runs/default/a/checkpoints/step_000003
code=0; timeout 120 T2 cell=b strategy=allreduce resume=$K > out 2>&1 || code=$?
test $code = 1; grep -q 'holds residuals of' out
try 0 'on 1 rank' T1 cell=c strategy=onebit resume=$K

## 208 checkpoint: a checkpoint after each of many steps
try 0 '60 steps of 24' T1 steps=60 checkpoint_every=1 cell=a
test "$(ls -A runs/default/a/checkpoints | wc -l)" = 2

## 209 checkpoint: resumed after an edit of the model's file
m <<< "$HEAD"
try 0 'done:' U1 data.size=16 model=m.M checkpoint_every=2 cell=a
rm runs/default/a/record.json; echo '# changed' >> m.py
try 0 '12 steps of 24' U1 data.size=16 model=m.M steps=12 cell=a resume=auto
grep -q '"first_step": 6' runs/default/a/record.json

## 210 checkpoint: times of files that mislead
try 0 'done:' T1 cell=a checkpoint_every=2; C=runs/default/a/checkpoints
rm runs/default/a/record.json
touch -d 2099-01-01 $C/step_000004; touch -d 1970-01-02 $C/step_000006
try 0 '12 steps of 24' T1 steps=12 cell=a resume=auto
grep -q '"first_step": 6' runs/default/a/record.json

## 212 checkpoint: a list of attempts that is missing
try 0 'done:' T1 cell=a checkpoint_every=2
rm runs/default/a/record.json runs/default/a/attempts.json
try 0 '12 steps of 24' T1 steps=12 cell=a resume=auto
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
code=0; timeout 120 env GLOO_SOCKET_IFNAME=nope T2 > out 2>&1 || code=$?
test $code = 1; grep -q 'Unable to find address for: nope' out
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

## 222 network: two sweeps at once, on two ranks each
S study=a strategy=none world_size=2 > oa 2>&1 & p=$!
S study=b strategy=onebit world_size=2 > ob 2>&1 & q=$!
wait $p; wait $q; grep -q '1 of 1 cells done' oa; grep -q '1 of 1 cells done' ob

## 223 network: a host without IPv6 and with no line in /etc/hosts
try 0 'on 2 ranks' unshare -n -m bash -c 'ip link set lo up; mount --bind /dev/null /etc/hosts
  echo 1 2> /dev/null > /proc/sys/net/ipv6/conf/all/disable_ipv6; T2 cell=a'

## 224 http: addresses without the page's word, or around it
live strategy=none steps=300000
$PY - "$u" <<'E'
import http.client, sys, urllib.parse
u = urllib.parse.urlsplit(sys.argv[1]); word = u.path.strip("/")
def ask(path):
    c = http.client.HTTPConnection(u.netloc, timeout=20); c.request("GET", path)
    return c.getresponse().status
assert ask(u.path) == 200
up, low = f"/{word}/../../etc/passwd", f"/{word}/..%2f..%2fetc/passwd"
for path in ("/", "/favicon.ico", f"/{word[:-1]}/", f"/{word.swapcase()}/", f"/?{word}", up, low):
    assert ask(path) == 404, path
E
stop_live

## 225 http: names of other hosts, as of a site that rebinds its name
live strategy=none steps=300000
$PY - "$u" <<'E'
import http.client, sys, urllib.parse
u = urllib.parse.urlsplit(sys.argv[1])
def ask(host):
    c = http.client.HTTPConnection(u.netloc, timeout=20)
    c.request("GET", u.path, headers={"Host": host}); return c.getresponse().status
assert ask(u.netloc) == 200
for host in ("evil.example", f"evil.example:{u.port}", f"127.0.0.1.evil:{u.port}", "[::1]", ""):
    assert ask(host) == 404, host
E
stop_live

## 226 http: the stop button by other methods and from other sites
live strategy=none steps=300000
$PY - "$u" <<'E'
import http.client, sys, urllib.parse
u = urllib.parse.urlsplit(sys.argv[1])
def ask(method, **headers):
    c = http.client.HTTPConnection(u.netloc, timeout=20)
    c.request(method, u.path + "stop", headers=headers); return c.getresponse().status
for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"):
    assert ask(method) in (404, 501), method
for origin in ("null", "http://evil.example"): assert ask("POST", Origin=origin) == 404, origin
E
sleep 2; kill -0 $p; stop_live

## 227 http: the page's own stop button, while a cell runs
live strategy=none,onebit steps=300000
until_true eval 'ls runs/s/*/attempts.json'; sleep 2
$PY - "$u" <<'E'
import http.client, sys, urllib.parse
u = urllib.parse.urlsplit(sys.argv[1]); c = http.client.HTTPConnection(u.netloc, timeout=20)
c.request("POST", u.path + "stop", headers={"Origin": f"http://{u.netloc}"})
assert c.getresponse().status == 303
E
code=0; wait $p || code=$?; test $code = 130; grep -q 'the same command continues' o
grep -q '"status": "interrupted"' runs/s/*/record.json

## 228 http: many clients, slow ones, and ones that speak something else
live strategy=none,onebit steps=3000
$PY - "$u" <<'E'
import contextlib, os, socket, struct, sys, time, urllib.parse
u, kept = urllib.parse.urlsplit(sys.argv[1]), []
many = b"GET / HTTP/9.9\r\n" + b"a: b\r\n" * 10000
for i in range(120):
    with contextlib.suppress(OSError):
        kept.append(s := socket.create_connection((u.hostname, u.port), 5))
        s.sendall((b"G", os.urandom(1000), many, b"\x16\x03\x01")[i % 4])
        if i % 3 == 0: s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if i % 3 == 0: s.close()
time.sleep(3)
E
wait $p; grep -q '2 of 2 cells done' o; if grep -q Traceback o; then exit 1; fi

## 230 http: clients that leave before the answer
live strategy=none steps=300000
$PY - "$u" <<'E'
import contextlib, socket, sys, urllib.parse
u = urllib.parse.urlsplit(sys.argv[1])
asks = f"GET {u.path} HTTP/1.0\r\nHost: {u.netloc}\r\n\r\n".encode()
for _ in range(60):
    with contextlib.suppress(OSError), socket.create_connection((u.hostname, u.port), 20) as s:
        s.sendall(asks)
E
sleep 1; stop_live
if grep -Eq 'Traceback|BrokenPipe|reset by peer' o; then exit 1; fi

## 231 http: the page's word is in the terminal alone
live strategy=none steps=300000
until_true eval 'ls runs/s/*/attempts.json'; sleep 1
w=${u%/}; w=${w##*/}; test ${#w} -ge 20
for q in $(ranks); do
  if cat /proc/$q/cmdline /proc/$q/environ | grep -aqFe "$w"; then exit 1; fi
done
stop_live
if grep -rqFe "$w" runs; then exit 1; fi

## 232 http: headers of the page, and of a page that is not there
live strategy=none steps=300000
$PY - "$u" <<'E'
import http.client, sys, urllib.parse
u = urllib.parse.urlsplit(sys.argv[1])
for path, status in ((u.path, 200), ("/x", 404)):
    c = http.client.HTTPConnection(u.netloc, timeout=20); c.request("GET", path)
    r = c.getresponse(); assert r.status == status, r.status
    assert r.headers["X-Frame-Options"] == "DENY" and r.headers["Cache-Control"] == "no-store"
    assert r.headers["X-Content-Type-Options"] == "nosniff" and "Python" not in r.headers["Server"]
    assert r.headers["Referrer-Policy"] == "no-referrer"
E
stop_live

## 233 http: the page at other addresses of the machine
live strategy=none steps=300000
$PY - "$u" <<'E'
import socket, sys, urllib.parse
u = urllib.parse.urlsplit(sys.argv[1])
for host in ("127.0.0.2", "::1"):
    try: socket.create_connection((host, u.port), 5)
    except OSError: continue
    sys.exit(f"answers at {host}")
E
stop_live

## 236 out: files that matter as a command's out=
base; cp runs/s/study.json a; cp runs/s/bd/record.json b
try 2 'runs write a file with this name' L bench footprint model=lenet out=runs/s/study.json
try 2 'out=' L report runs/s out=runs/s/bd/record.json
try 2 'out=' L explain runs/s out=x
try 2 'out=' L verify kim2017 out=nodir/x.md
cmp a runs/s/study.json; cmp b runs/s/bd/record.json

## 237 out: files that cannot be written
base; try 1,2 'y.json' L bench footprint model=lenet out=/proc/y.json
try 1,2 'z' L predict strategy=tree world_size=2 out=/proc/z.json
try 2 'x.yaml: cannot be written' L profile_layers model=mlp device=cpu batch_size=8 steps=12 \
  out=/proc/x.yaml
try 2 'z.html' L report runs/s out=/proc/z.html

## 238 out: settings of figures
base
for a in only=nonsense format=exe format= width_in=nan target=abc; do
  try 2 "$a|${a%=*}=" L plot runs/s $a
done
try 2 "baseline=nope: has no finished run on one rank" L plot runs/s baseline=nope

## 239 out: studies that have nothing to show
base; mkdir -p e/x; for c in plot report explain score; do
  try 2 'holds no <cell>/record.json' L $c e
done
sed -i 's/"status": "done"/"status": "running"/' runs/s/*/record.json
try 2 "status='running'" L plot runs/s

## 240 out: a page with odd signs in its name, and a cell that is no study
base; try 0 'wrote' L report runs/s 'out=a#b?c%20.html'; test -s 'a#b?c%20.html'
try 2 'holds no' L report runs/s runs/s/bd out=q.html
test ! -e q.html

## 241 out: the same figures twice
base; try 0 'wrote' L plot runs/s out=x format=svg,pdf
try 0 'wrote' L plot runs/s out=y format=svg,pdf
diff -r x y

## 243 versions: records of another version, or of a newer lab
base; r=$(echo runs/s/onebit-n2*/record.json); cp "$r" r
sed -i 's/"schema": [0-9]*/"schema": 1/' "$r"
try 0 'in a record of schema 1 must be' L plot runs/s
sed 's/"schema": [0-9]*/"schema": 999/' r > "$r"; try 0 'schema=999; this version' L plot runs/s
sed 's/"strategy": "onebit"/"strategy": "quantum"/' r > "$r"; try 0 'wrote' L plot runs/s
try 0 'wrote' L report runs/s

## 244 versions: a saved grid with a setting that is gone
base; sed -i 's/"steps=6"/"steps=6", "overlap_mb=3"/' runs/s/study.json
try 2 'overlap_mb=3: no such setting' L sweep study=s

## 246 versions: a record in another cell's folder, and a study that is renamed
base; cp runs/s/bd/record.json runs/s/onebit-n2*/record.json
try 2 'is the record of bd' S study=s strategy=allreduce,onebit world_size=1,2
try 2 'are the same cell' L plot runs/s
rm -r runs; base; mv runs/s runs/t
try 0 'nothing is missing' S study=t strategy=allreduce,onebit world_size=1,2 dry_run=true

## 247 versions: commits and versions of torch that differ in one study
base; r=(runs/s/*/record.json)
sed -i 's/"commit": "[^"]*"/"commit": null/' "${r[1]}"
sed -i 's/"commit": "[^"]*"/"commit": "dirty"/; s/"torch": "[^"]*"/"torch": "2.10"/' "${r[2]}"
sed -i 's/"torch": "[^"]*"/"torch": "2.9"/' "${r[3]}"
try 0 'wrote' L plot runs/s
try 0 'wrote' L report runs/s
try 0 'lab.explain' L explain runs/s

## 250 trackers: curves that are a folder, or a link to a user's file
mkdir -p runs/s/a/curves.csv runs/s/b; echo keep > precious
ln -s "$PWD/precious" runs/s/b/curves.csv
try 0 'done:' T1 recorder=csv study=s cell=a
try 0 'done:' T1 recorder=csv study=s cell=b; grep -qx keep precious

## 251 trackers: a package of a tracker that ends the process
mkdir -p p/tensorboard; echo 'raise SystemExit(0)' > p/tensorboard/__init__.py
try 0 'is off' env PYTHONPATH="$PWD/p:${PYTHONPATH-}" T1 recorder=tensorboard cell=b
record b status done

## 252 trackers: a mode of wandb in other letters
try 2 'recorder.mode=Online|needs the package' T1 recorder=wandb recorder.mode=Online
test -z "$(find runs -name record.json 2> /dev/null)"

## 253 trackers: settings of a recorder that there are not
try 2 'recorder.mode=shared|needs the package' T1 recorder=wandb recorder.mode=shared
try 2 'recorder=none: allowed:' T1 recorder=none
test -z "$(find runs -name record.json 2> /dev/null)"

## 255 secrets: settings whose names make them secrets
m <<< "${HEAD/num_classes):/num_classes, **kw):}"; a=()
for k in api_token apiToken API_KEY passwd pwd auth credentials private_key bearer cookie; do
  a+=("+model.$k=hunter2-$k")
done
a+=('+model.cfg={password: hunter2-cfg}')
try 0 'done:' U1 data.size=16 model=m.M "${a[@]}" cell=x
if grep -rq hunter2 out runs; then exit 1; fi
try 0 'model' U1 data.size=16 model=m.M "${a[@]}" --cfg job
if grep -q hunter2 out; then exit 1; fi

## 256 secrets: values that have the shape of a secret
t=ghp_0123456789abcdefghijklmnopqrstuvwxyzAB
try 2 'names a directory' T1 cell=$t
try 2 'names a directory' T1 study=$t; test ! -e runs; if grep -q $t out; then exit 1; fi
m <<< "${HEAD/num_classes):/num_classes, **kw):}"
try 0 'done:' U1 data.size=16 model=m.M +model.a=AKIAIOSFODNN7EXAMPLE \
  +model.b=glpat-abcdefghij0123456789 +model.c=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH \
  +model.d=s3://KEYKEY:pwpw77@b
if grep -rqE 'AKIAIOSF|glpat-|hf_abcd|pwpw77' out runs; then exit 1; fi

## 257 secrets: secrets in lines about wrong settings
t=ghp_0123456789abcdefghijklmnopqrstuvwxyzAB
for a in optim.lr=$t $t=1 model=m.$t batch_size=https://u:pwpw77@h; do
  try 2 'error:' T1 $a; if grep -qE "$t|pwpw77" out; then exit 1; fi
done
try 2 'error:' T1 --config-dir /x/$t; if grep -q $t out; then exit 1; fi

## 258 secrets: a grid over secrets
m <<< "${HEAD/num_classes):/num_classes, **kw):}"
try 2 'in secrets alone' L sweep device=cpu steps=4 batch_size=24 threads=1 data.size=16 model=m.M \
  study=s strategy=none '+model.api_token=tokAAAA,tokBBBB'
test ! -e runs; if grep -q tokAAAA out; then exit 1; fi

## 259 secrets: a secret that a setting takes from a variable
t=ghp_0123456789abcdefghijklmnopqrstuvwxyzAB; m <<< "${HEAD/num_classes):/num_classes, **kw):}"
U='U1 data.size=16 model=m.M +model.api_key=${oc.env:TOKEN}'
try 0 'done:' env TOKEN=$t $U checkpoint_every=2 cell=x; if grep -rq $t .; then exit 1; fi
try 0 'model' env TOKEN=$t $U --cfg job; if grep -q $t out; then exit 1; fi

## 260 secrets: a secret that is a number of the record
m <<< "${HEAD/num_classes):/num_classes, **kw):}"
try 0 'done:' U1 data.size=16 model=m.M +model.api_token=24 cell=x
record x batch_size 24; record x status done

## 261 secrets: secrets in the user's own errors
m <<< "import os; $HEAD
class N(M):
    def forward(self, x):
        error = ValueError(os.environ['TEXT']); error.add_note(os.environ['NOTE']); raise error"
t=ghp_0123456789abcdefghijklmnopqrstuvwxyzAB; code=0
timeout 120 env "TEXT=no $t" "NOTE=$t" U1 data.size=16 model=m.N cell=a > out 2>&1 || code=$?
test $code = 1; record a status failed; if grep -rq $t out runs; then exit 1; fi

## 262 secrets: secrets in variables whose names begin as those that are recorded
e='WANDB_API_KEY=kkkk9991 NCCL_TOKEN=kkkk9993 OMP_SECRET=kkkk9995 TORCH_X_PASSWORD=kkkk9997'
try 0 'on 2 ranks' env $e HOROVOD_AUTH=kkkk9994 GLOO_X=http://u:kkkk9998@h T2 cell=a
if grep -rq kkkk999 out runs; then exit 1; fi

## 264 secrets: the user's name in what is shared
mkdir -p home/alice.smith; cd home/alice.smith; base
try 0 'wrote' env USER=alice.smith LOGNAME=alice.smith L plot runs/s format=svg,pdf,png
try 0 'wrote' env USER=alice.smith LOGNAME=alice.smith L report runs/s
for f in runs/s/report.html runs/s/figures/*.svg runs/s/figures/*.pdf runs/s/figures/*.png; do
  if grep -aqF alice.smith "$f"; then exit 1; fi
done

## 265 launch: options of the scripts
PATH=$(dirname "$PY"):$PATH; d=$($PY -c 'import lab; print(lab.__path__[0])')/../launch
for n in 0 -1 x 1.5 '$(touch ran)'; do
  try 2 'must be a number of at least 1' bash "$d/local.sh" --ranks "$n" device=cpu steps=3
done
n=(bash "$d/node.sh" --job j --ranks 1)
try 2 'must be HOST:PORT' "${n[@]}" --nodes 1 --rendezvous host
try 2 'must be N or MIN:MAX' "${n[@]}" --nodes 2:1 --rendezvous h:29400
try 2 'must be a number' "${n[@]}" --nodes 1 --rendezvous h:29400 --wait x
test ! -e ran

## 266 launch: settings with quotes and brackets through a script
PATH=$(dirname "$PY"):$PATH; d=$($PY -c 'import lab; print(lab.__path__[0])')/../launch
n=(bash "$d/local.sh" --ranks 1 device=cpu steps=3 data.size=16 model=mlp); code=0
timeout 120 "${n[@]}" "study=it's" > out 2>&1 || code=$?
test $code = 1; grep -q 'is not a setting' out
touch 'model.hidden=8'; try 0 'done:' "${n[@]}" 'model.hidden=[8]' cell=a

## 267 launch: a script started by a link, and in its own folder
PATH=$(dirname "$PY"):$PATH; d=$($PY -c 'import lab; print(lab.__path__[0])')/../launch
o="--ranks 1 device=cpu steps=2 data.size=16 model=mlp model.hidden=[8] runs_dir=$PWD/runs"
ln -s "$d/local.sh" l.sh; try 0 'done:' bash l.sh $o cell=a
try 0 'done:' bash -c "cd '$d'; exec bash local.sh $o cell=b"
record a status done; record b status done

## 268 launch: the script of SLURM outside of SLURM, and lines that would run programs
s=$($PY -c 'import lab; print(lab.__path__[0])')/../launch/slurm.sbatch
try 2 'submit this with sbatch' bash "$s" strategy=onebit
printf 'steps=3\n$(touch ran)\n; touch ran\n' > cells
e='SLURM_JOB_ID=5 SLURM_NNODES=1 SLURM_NTASKS=1 SLURM_JOB_NODELIST=localhost'
try 2 'there is no cell in line 99' env $e SLURM_ARRAY_TASK_ID=99 bash "$s" --cells cells
for i in 2 3; do
  timeout 60 env $e SLURM_ARRAY_TASK_ID=$i bash "$s" --cells cells > o 2>&1 || true
done
test ! -e ran

## 270 launch: emulated clusters that cannot be
n=$(ip -o link | wc -l)
try 2 'hosts=null' L cluster run -- -m lab.train steps=2
try 2 'after -- stand' L cluster run --
try 2 'expected one run' L cluster
try 2 'cluster.hosts=3' S study=s strategy=none world_size=2 cluster=emulated cluster.hosts=3
test "$(ip -o link | wc -l)" = "$n"

## 271 launch: programs of SLURM that fail
mkdir bin; printf '#!/bin/bash\necho 77\n' > bin/sbatch; printf '#!/bin/bash\nexit 1\n' > bin/squeue
chmod +x bin/*; e="PATH=$PWD/bin:$PATH"
try 2 'launcher=slurm: squeue' env "$e" S launcher=slurm study=s strategy=none world_size=1,2
test -z "$(find runs -name record.json)"

## 272 launch: options that torchrun refuses
for a in --nproc-per-node=0 --nproc-per-node=x --max-restarts=-1 '--log-dir /proc/x'; do
  try 2 'lab.distributed.torchrun: error:' $PY -m lab.distributed.torchrun $a -m lab.train steps=2
done

## 273 launch: Horovod, where it is not installed
if $PY -c 'import horovod' 2> /dev/null; then exit 0; fi
try 2 'Horovod cannot be imported|make horovod' T1 strategy=horovod
try 2 'make horovod' S study=s strategy=horovod world_size=2

## 274 launch: variables of torchrun with odd values
r="$PY -m lab.distributed.torchrun -m lab.train device=cpu steps=2"
try 2 'lab.distributed.torchrun: error:' env PET_NPROC_PER_NODE=x $r
try 2 'lab.distributed.torchrun: error:' env PET_NNODES=0:0 $r
try 2 'invalid int value' env PET_MASTER_PORT=abc $r

## 275 sweep: equal cells in other words
for a in batch_size=24,24 optim.lr=0.01,1e-2 overlap=true,True 'model.hidden=[8],[ 8 ]'; do
  try 2 'listed twice' S study=s strategy=onebit dry_run=true "$a"
done

## 276 sweep: conditions that no cell meets, or that set what a condition cannot
S='S study=s dry_run=true strategy=onebit,allreduce'
try 2 'a condition cannot set strategy' $S strategy=onebit:strategy=tree
try 2 'nope=1: no such setting' $S strategy=onebit:nope=1
try 2 'no cell has seed=1' $S seed=1:steps=7
try 2 'names a directory' $S study=a:b

## 279 sweep: other words for retry
for v in Failed all; do
  try 2 "retry=$v: allowed: none, failed" S study=s strategy=allreduce retry=$v
done

## 280 sweep: turns that are none, or more than there are steps
for v in 0 -1 1.5; do
  try 2 "turns=$v: must be" S study=s strategy=allreduce,onebit world_size=2 turns=$v
done
try 1 '0 of 2 cells done' S study=s strategy=allreduce,onebit world_size=2 turns=100

## 296 loop: steps of lab.Run outside of it and within another
cat > own.py <<'E'
import lab
from torch import nn
def refused(kind, act):
    try: act()
    except kind as error: return print("refused:", error)
    raise SystemExit("accepted")
def run(**more):
    own = dict(study="m", strategy="allreduce", model=nn.Linear(4, 2), batch_size=8)
    return lab.Run(**(own | more))
def step():
    with mine.step(): pass
refused(lab.ConfigError, lambda: run(study="../x"))
refused(lab.ConfigError, lambda: run(settings={"o": object()}))
mine = run(); refused(RuntimeError, step)
with mine:
    with mine.step(): refused(RuntimeError, step)
refused(RuntimeError, step)
E
try 0 'within another step' $PY own.py; grep -q '"num_steps": 1' runs/m/*/record.json

## 298 loop: states that no strategy has saved
cat > own.py <<'E'
import os, lab, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/group", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
state = lab.attach(model, "onebit"); model(torch.ones(2, 3)).sum().backward()
for wrong in (None, {}, [1]):
    try: state.load_state_dict(wrong)
    except ValueError as error: print("refused:", error)
    else: raise SystemExit("accepted")
state.load_state_dict(state.state_dict())
E
try 0 'must be what state_dict' $PY own.py

## 299 loop: imports of the lab beside a folder of that name, and without torch
mkdir lab stub; try 0 'function attach' $PY -c 'import lab; print(lab.attach)'
rmdir lab; echo 'raise ImportError("no torch here")' > stub/torch.py; code=0
timeout 120 env PYTHONPATH="$PWD/stub:${PYTHONPATH-}" L train > out 2>&1 || code=$?
test $code = 2; grep -q 'error: .*no torch here' out

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

## 303 numbers: a test set that ranks do not divide
cat > d.py <<'E'
import torch
def both(seed, n):
    g = torch.Generator().manual_seed(1)
    a, b = (torch.rand(k, 1, 8, 8, generator=g) for k in (96, n))
    pairs = ((x, torch.arange(len(x)) % 10) for x in (a, b))
    return tuple(torch.utils.data.TensorDataset(*pair) for pair in pairs)
E
o='data=d.both +data.n=59 model=mlp model.hidden=[8] optim.lr=0 steps=4'
try 0 'done:' U1 $o cell=a
try 0 'done:' U2 $o cell=b
$PY -c 'import json
a, b = (json.load(open(f"runs/default/{c}/record.json"))["final"] for c in "ab")
assert a["accuracy"] == b["accuracy"] and abs(a["loss"] - b["loss"]) < 1e-6, (a, b)'

## 306 numbers: runs of one and of two steps
for s in 1 2; do
  try 0 'none was timed' T1 steps=$s cell=s$s
  record s$s samples_per_s None; record s$s num_timed_steps 0
done

## 307 numbers: runs that send nothing
try 0 'nothing to exchange' T1 strategy=onebit cell=a
try 0 'payload +0.000 MB' T2 strategy=none cell=b

## 309 numbers: fp16 that overflows in each step
m <<< "$HEAD
class N(M):
    def forward(self, x):
        y = super().forward(x)
        return y * torch.tensor(1e38) * 10 if self.training else y"
try 0 'skipped +6 steps' U1 data.size=16 model=m.N precision=fp16 cell=x
record x num_skipped_steps 6

## 310 numbers: a model that ignores its inputs
m <<'E'
import torch
from torch import nn
class M(nn.Module):
    def __init__(self, image_shape, num_classes):
        super().__init__(); self.b = nn.Parameter(torch.zeros(num_classes))
    def forward(self, x):
        return self.b.expand(len(x), -1)
E
try 0 'done:' U2 data.size=16 model=m.M cell=x; record x status done

## 312 numbers: a study and its copy on one page
base; cp -r runs/s runs/t
try 0 'wrote q.html' L report runs/s runs/t out=q.html
test -s q.html

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

## 319 system: all processes of a run are suspended for longer than an exchange may take
T2 steps=2000 exchange_timeout_s=5 cell=a > o 2>&1 & p=$!
begun a; k=$(ranks); kill -STOP $k; sleep 12; kill -CONT $k
wait $p || grep -q 'exchange_timeout_s=5: rank' runs/default/a/record.json  # within an exchange
