"""Clusters of namespaces: Horovod runs in them, links have the bandwidth asked for, and nothing is left of them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

CLUSTER_PY = Path(__file__).resolve().parents[2] / "benchmarks" / "cluster.py"
sys.path.insert(0, str(CLUSTER_PY.parent))

from cluster import HEADERS, Cluster, bits_per_second, discipline, unavailable  # noqa: E402

MARK = "HVD_QUANT_TEST_CLUSTER"  # an environment variable by which a test finds the processes it has started
REASON = unavailable()
needs_cluster = pytest.mark.skipif(REASON is not None, reason=f"no cluster here: {REASON}")

STEPS, ENTRIES = 5, 2**21
ALLREDUCE = f"""
import socket
import torch
import horovod.torch as hvd
hvd.init()
for step in range({STEPS}):
    total = hvd.allreduce(torch.full(({ENTRIES},), hvd.rank() + 1.0), op=hvd.Sum, name="x")
saw = ["saw", socket.gethostname(), hvd.rank(), hvd.cross_size(), hvd.local_size(), *set(total.tolist())]
print(" ".join(map(str, saw)) + "\\n", end="")  # in one piece: mpirun writes its prefix before each
"""
SLEEP = ("sh", "-c", "echo started; exec sleep 1000")


def cluster_py(*arguments, mark="", prefix=(), **env):
    return subprocess.Popen([*prefix, sys.executable, str(CLUSTER_PY), *arguments], text=True,
                            env={**os.environ, MARK: mark, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def processes(mark):
    """Whose environment has the mark, with their arguments; namespaces and links live no longer than processes."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}" in (process / "environ").read_text().split("\0"):
                found[int(process.name)] = (process / "cmdline").read_text().split("\0")
        except OSError:
            pass  # ended meanwhile
    return found


def assert_gone(mark):
    """Of what is killed with SIGKILL nobody waits for the end, so it may take a moment."""
    deadline = time.monotonic() + 20
    while left := processes(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def machine():
    """What a cluster might leave on the machine besides processes."""
    folders = "/sys/class/net", "/run/netns", "/etc/netns", "/run/uts", "/run/bin"
    return ([sorted(os.listdir(folder)) if os.path.isdir(folder) else None for folder in folders],
            os.uname().nodename, Path("/etc/hosts").read_text(), "cluster /" in Path("/proc/self/mounts").read_text(),
            [*Path("/tmp").glob("ompi.host*"), *Path("/dev/shm").glob("*host[0-9]*")])


@pytest.fixture(autouse=True)
def untouched():
    before = machine()
    yield
    assert machine() == before


@pytest.fixture(scope="module")
def cluster():
    with Cluster(hosts=2) as cluster:
        yield cluster


# ---------------------------------------------------------------------------------------------------- what it does

@needs_cluster
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_horovod_sees_two_hosts(cluster, controller):
    pytest.importorskip("horovod.torch", reason="Horovod is not built for PyTorch")
    if controller == "mpi" and not shutil.which("mpirun"):
        pytest.skip("no mpirun: Horovod runs on Gloo alone here")
    before = cluster.bytes_sent()
    env = {"OMP_NUM_THREADS": "1", MARK: (mark := uuid.uuid4().hex)}
    run = cluster.run([sys.executable, "-c", ALLREDUCE], controller, env, timeout=120)
    sent = [after - first for after, first in zip(cluster.bytes_sent(), before)]
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(re.findall("saw (.*)", run.stdout)) == ["host0 0 2 1 3.0", "host1 1 2 1 3.0"]
    ring = STEPS * ENTRIES * 4  # among two, a worker sends half of the vector twice
    assert all(ring <= bytes < 1.1 * ring for bytes in sent), sent
    assert_gone(mark)


@needs_cluster
def test_links_have_their_rate(cluster):
    for rate in ("100mbit", "50mbit"):
        cluster.set_rate(rate)
        assert 0.7 < cluster.bandwidth(seconds=1.0) * HEADERS / bits_per_second(rate) < 1.05
    cluster.set_rate("unlimited")
    assert cluster.bandwidth(seconds=0.2) > 2e8


@needs_cluster
def test_clusters_do_not_meet(cluster):
    with Cluster(hosts=3, rate="10mbit") as other:
        assert other.bandwidth(seconds=0.2) < 2e7 < cluster.bandwidth(seconds=0.2)
        assert len(other.bytes_sent()) == 3


@needs_cluster
def test_slots_environment_and_exit_code():
    mark = uuid.uuid4().hex
    command = 'echo "$(hostname) says $WORD"; sleep $HOROVOD_RANK; exit 3'
    process = cluster_py("--slots", "2", "--env", "WORD=it's", "--", "sh", "-c", command, mark=mark)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "Exit code: 3" in output, output  # horovodrun makes 1 of every failure
    assert "[0]<stdout>:host0 says it's" in output, output
    assert_gone(mark)


# ----------------------------------------------------------------------------------------------------- what is left

@needs_cluster
def test_a_check_says_what_it_measured_and_leaves_nothing():
    process = cluster_py("--check", "--rate", "100mbit", mark=(mark := uuid.uuid4().hex))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and re.search(r"with headers: [01]\.\d+ of the 100mbit asked for", output), output
    assert_gone(mark)


@needs_cluster
@pytest.mark.parametrize("number, victim", [(signal.SIGTERM, "cluster.py"), (signal.SIGINT, "cluster.py"),
                                            (signal.SIGKILL, "cluster.py"), (signal.SIGKILL, "horovodrun")])
def test_a_signal_leaves_nothing(number, victim):
    process = cluster_py("--", *SLEEP, mark=(mark := uuid.uuid4().hex))
    while "started" not in (line := process.stdout.readline()):
        assert line, f"ended with {process.wait()}"
    os.kill(next(pid for pid, arguments in processes(mark).items() if arguments[1].endswith(victim)), number)
    assert process.wait(timeout=30) != 0
    process.stdout.close()
    assert_gone(mark)


@needs_cluster
def test_a_timeout_leaves_the_cluster(cluster):
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(SLEEP, env={MARK: (mark := uuid.uuid4().hex)}, timeout=5)
    assert_gone(mark)
    assert cluster.bandwidth(seconds=0.2) > 0


@needs_cluster
def test_an_exception_leaves_nothing(monkeypatch):
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    with pytest.raises(ZeroDivisionError), Cluster(hosts=2):
        assert processes(mark)
        raise ZeroDivisionError
    assert not processes(mark)  # a cluster that is left has ended


# -------------------------------------------------------------------------------------------------- what it refuses

@needs_cluster
def test_needs_root():
    process = cluster_py("--check", prefix=("unshare", "--user"))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and re.fullmatch("cluster.py: a cluster needs root .*: run it as root.*\n", output)


@needs_cluster
@pytest.mark.parametrize("tool, package", [("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux"),
                                           ("unshare", "util-linux"), ("mpirun", "openmpi-bin")])
def test_names_the_missing_package(tmp_path, tool, package):
    used = "ip tc nsenter unshare mpirun sh mount mkdir cat chmod touch hostname true"
    for other in set(used.split()) - {tool}:
        if path := shutil.which(other):
            (tmp_path / other).symlink_to(path)
    process = cluster_py("--controller", "mpi", "--", "true", PATH=str(tmp_path))
    output = process.communicate(timeout=60)[0]
    assert output == f"cluster.py: {tool} is not in PATH: install it with `apt-get install {package}`\n"
    assert process.returncode == 2


@pytest.mark.parametrize("rate, bits", [("1gbit", 1e9), ("1.5Gbit", 1.5e9), ("8000", 8e3), ("1mbps", 8e6),
                                        ("2kibit", 2048), ("unlimited", None)])
def test_rates(rate, bits):
    assert bits_per_second(rate) == bits


def test_a_bucket_holds_a_millisecond_and_ten_packets():
    assert discipline("1gbit") == "tbf rate 1000000000bit burst 125000b latency 50ms"
    assert discipline("10mbit") == "tbf rate 10000000bit burst 15140b latency 50ms"


@pytest.mark.parametrize("arguments, sentence", [
    (dict(rate="fast"), "the rate is 'fast', expected"), (dict(rate="0mbit"), "the rate is '0mbit', expected"),
    (dict(rate="10m"), "the rate is '10m', expected"), (dict(hosts=1), "hosts is 1, expected 2 to 254"),
    (dict(slots=0), "slots is 0, expected at least 1")])
def test_arguments_are_checked(arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Cluster(**arguments)
