"""A cluster on one machine: hosts with links of a given bandwidth, where horovodrun works as it does across machines.

Each host is a network namespace with a name of its own, and a bridge joins them, so that Horovod, Gloo and MPI talk
over TCP through shaped links, and see one machine a host. Processors, memory and files are shared. It needs root.

Bridge, links and names, and the cluster's own /run, /dev/shm and /etc/hosts, belong to namespaces that live as long as
one process, the first of a PID namespace. It ends when a pipe held here closes, and the kernel removes them all. So
nothing is left however a run ends, SIGKILL included, and clusters see neither each other nor the machine's network.

    python benchmarks/cluster.py --hosts 4 --rate 1gbit -- python examples/pytorch/pytorch_mnist.py --compression onebit

    with Cluster(hosts=4, rate="1gbit") as cluster:
        done = cluster.run(["python", "train.py"])      # a subprocess.CompletedProcess
        print(done.returncode, cluster.bytes_sent())
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_quant.exchange.cost import bits_per_second

CONTROLLERS = ("gloo", "mpi")
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
NAMESPACES = ("--kill-child", "--pid", "--mount-proc", "--net", "--uts", "--ipc")
HEADERS = 1514 / 1448  # what a link carries over what a TCP socket gives it, in packets of 1500 bytes

# What horovodrun and mpirun call as ssh: options come before and after the host, the rest is for the host's shell.
# `ip netns exec` also brings the /sys that goes with the network.
SSH = """\
#!/bin/sh
host=
while :; do
    case $1 in
        -[oip]) shift 2 ;;
        -*) shift ;;
        *) [ -z "$host" ] || break
           host=$1
           shift ;;
    esac
done
exec ip netns exec "$host" nsenter --uts="/run/uts/$host" sh -c "$*"
"""

# What the first process does before it waits. A child it inherits is reaped by the kernel, since CHLD is ignored. The
# route names the congestion control, since the machine's may be one that another namespace isn't free to change.
BUILD = """\
set -e
mount -t tmpfs cluster /run
mount -t tmpfs -o mode=1777 cluster /dev/shm
mkdir /run/bin /run/uts
cat > /run/bin/ssh <<'END'
{ssh}END
chmod +x /run/bin/ssh
echo 127.0.0.1 localhost > /run/hosts
mount --bind /run/hosts /etc/hosts
ip link add bridge type bridge
ip link set bridge up
n=0
for host in {hosts}; do
    n=$((n + 1))
    echo 10.0.0.$n $host >> /run/hosts
    ip netns add $host
    touch /run/uts/$host
    unshare --uts=/run/uts/$host hostname $host
    ip link add $host type veth peer name eth0 netns $host
    ip link set $host master bridge up
    ip -n $host addr add 10.0.0.$n/24 dev eth0
    ip -n $host link set eth0 up
    ip -n $host link set lo up
    ip -n $host route replace 10.0.0.0/24 dev eth0 congctl cubic
done
{shape}
trap '' CHLD
echo built
exec cat
"""
SHAPE = """\
for host in {hosts}; do
    tc qdisc replace dev $host root {discipline}
    tc -n $host qdisc replace dev eth0 root {discipline}
done
"""

RECEIVE = """\
import socket, time
server = socket.create_server(("", 7000))
print(flush=True)
connection, _ = server.accept()
received, start = -len(connection.recv(1 << 20)), time.monotonic()
while part := connection.recv(1 << 20):
    received += len(part)
print(8 * received / (time.monotonic() - start))
"""
SEND = """\
import socket, time
with socket.create_connection(("{host}", 7000)) as connection:
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 20))
"""


class ClusterError(RuntimeError):
    """No cluster here: what is missing, and what to do."""


def search_path(env: Mapping[str, str]) -> str:
    """PATH with this Python's environment first, activated or not."""
    return f"{Path(sys.executable).parent}:{env.get('PATH', os.defpath)}"


def horovodrun() -> str | None:
    """The launcher of this Python's environment, or else of PATH."""
    return shutil.which("horovodrun", path=search_path(os.environ))


def unavailable(controller: str = "gloo") -> str | None:
    """Why no cluster can be built here, in one sentence; None where one can."""
    if os.geteuid() != 0:
        return (f"a cluster needs root to make namespaces, and this is user {os.geteuid()}: "
                "run it as root, or under `unshare --user --map-root-user`")
    for tool, package in {**PACKAGES, **({"mpirun": "openmpi-bin"} if controller == "mpi" else {})}.items():
        if not shutil.which(tool):
            return f"{tool} is not in PATH: install it with `apt-get install {package}`"
    if not horovodrun():
        return "horovodrun is neither beside this Python nor in PATH: run `hvd-quant build-horovod`"
    probe = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    if probe.returncode:
        return f"this root may not make namespaces ({probe.stderr.strip()}): in a container, start it with --privileged"
    return None


def discipline(rate: str) -> str:
    """The tc queueing discipline of one end of a link.

    The bucket holds a millisecond, which is all that a pause can save up for later, and at least ten packets. The queue
    holds 50 milliseconds, so that hosts which all send to one seldom lose a packet: to notice that takes TCP 200.
    """
    bits = bits_per_second(rate)
    if bits is None:
        return "noqueue"
    return f"tbf rate {bits:.0f}bit burst {max(bits / 8 / 1000, 15140):.0f}b latency 50ms"


class Cluster:
    """Hosts host0, host1, ... of `slots` workers, each with a link that carries `rate` in both directions at once."""

    def __init__(self, hosts: int = 2, rate: str = "unlimited", slots: int = 1):
        if not 2 <= hosts <= 254:
            raise ValueError(f"hosts is {hosts}, expected 2 to 254: horovodrun needs no cluster for one")
        if slots < 1:
            raise ValueError(f"slots is {slots}, expected at least 1")
        bits_per_second(rate)
        self.hosts, self.rate, self.slots = [f"host{i}" for i in range(hosts)], rate, slots

    def __enter__(self) -> "Cluster":
        if reason := unavailable():
            raise ClusterError(reason)
        names = " ".join(self.hosts)
        build = BUILD.format(ssh=SSH, hosts=names, shape=SHAPE.format(hosts=names, discipline=discipline(self.rate)))
        self._first = subprocess.Popen(["unshare", *NAMESPACES, "sh", "-c", build], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self._first.stdout.readline() != "built\n":
            raise ClusterError(f"the cluster could not be built: {self._first.communicate()[1].strip()}")
        pid = self._first.pid
        # The PID namespace too, without which /proc doesn't know tc, and tc then takes the clock for another.
        self._enter = ["nsenter", f"--target={pid}", "--mount", "--net", "--uts", "--ipc",
                       f"--pid=/proc/{pid}/ns/pid_for_children"]
        return self

    def __exit__(self, *_) -> None:
        self._first.communicate()  # closes the pipe and waits until the kernel has ended every process

    def run(self, command: Sequence[str], controller: str = "gloo", env: Mapping[str, str] | None = None,
            timeout: float | None = None, capture: bool = True) -> subprocess.CompletedProcess:
        """`horovodrun COMMAND` on every slot, launched from the first host; what it started ends with it."""
        if reason := unavailable(controller):
            raise ClusterError(reason)
        # horovodrun's cache, in the home directory, would be the machine's. MPI spins while it waits: on cores that the
        # hosts share, the others need it to yield. Its session files in /run go with the cluster.
        mpi = ["--mpi-args=--mca mpi_yield_when_idle 1 --mca orte_tmpdir_base /run"] if controller == "mpi" else []
        launch = [horovodrun(), "-np", str(len(self.hosts) * self.slots),
                  "-H", ",".join(f"{host}:{self.slots}" for host in self.hosts),
                  f"--{controller}", "--disable-cache", "--network-interfaces", "eth0", *mpi, *command]
        return subprocess.run(self._on(self.hosts[0], launch), env=self._environment(env or {}),
                              stdin=subprocess.DEVNULL, capture_output=capture, text=True, timeout=timeout)

    def set_rate(self, rate: str) -> None:
        """Change the bandwidth of every link, between two runs or during one."""
        shape = SHAPE.format(hosts=" ".join(self.hosts), discipline=discipline(rate))
        subprocess.run([*self._enter, "sh", "-e", "-c", shape], check=True)
        self.rate = rate

    def bytes_sent(self) -> list[int]:
        """What each host has sent since the cluster was built, as the bridge counts it: launches and headers too."""
        links = subprocess.run([*self._enter, "ip", "-json", "-stats", "link", "show", "type", "veth"],
                               check=True, stdout=subprocess.PIPE).stdout
        received = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in json.loads(links)}
        return [received[host] for host in self.hosts]

    def bandwidth(self, seconds: float = 2.0) -> float:
        """Bits a second from the first host to the second through one TCP connection, without headers."""
        def start(host: str, program: str) -> subprocess.Popen:
            return subprocess.Popen(self._on(host, [sys.executable, "-c", program]), env=self._environment({}),
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        sender, receiver = self.hosts[:2]
        with start(receiver, RECEIVE) as receiving:
            receiving.stdout.readline()
            with start(sender, SEND.format(host=receiver, seconds=seconds)):
                return float(receiving.stdout.readline())

    def _on(self, host: str, command: Sequence[str]) -> list[str]:
        """The command, as started from outside on a host.

        Each unshare takes its child along when it is killed, and the second one's child is the first process of a PID
        namespace: so where subprocess kills what it started, at a timeout, all that came of it ends.
        """
        return [*self._enter, "--no-fork", "unshare", "--kill-child", "unshare", "--kill-child", "--pid",
                "--mount-proc", f"--wd={os.getcwd()}", "ssh", host, shlex.join(command)]

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """This process' own, `env`, and a PATH on which ssh is the cluster's and python is this one."""
        merged = {**os.environ, **env}
        return {**merged, "PATH": f"/run/bin:{search_path(merged)}"}


def check(cluster: Cluster) -> str:
    """One line on what a link gives, against what was asked for."""
    measured, asked = cluster.bandwidth(), bits_per_second(cluster.rate)
    line = f"{measured / 1e6:.1f} Mbit/s through one TCP connection, {measured * HEADERS / 1e6:.1f} with headers"
    return f"{line}: {measured * HEADERS / asked:.3f} of the {cluster.rate} asked for" if asked else line


def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no assignment, expected NAME=VALUE")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s [options] -- COMMAND...")
    parser.add_argument("--hosts", type=int, default=2, help="at least 2 (%(default)s)")
    parser.add_argument("--slots", type=int, default=1, help="workers a host (%(default)s)")
    parser.add_argument("--rate", default="unlimited", help="of each link, in tc's syntax, as 100mbit (%(default)s)")
    parser.add_argument("--controller", choices=CONTROLLERS, default="gloo", help="of Horovod (%(default)s)")
    parser.add_argument("--env", type=assignment, action="append", default=[], metavar="NAME=VALUE",
                        help="for the workers, may be given several times")
    parser.add_argument("--check", action="store_true", help="measure a link first")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="what horovodrun starts on every slot, after --")
    args = parser.parse_args()
    if not args.command and not args.check:
        parser.error("there is nothing to do: give a command after --, or --check")
    try:
        cluster = Cluster(args.hosts, args.rate, args.slots)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as SIGTERM: this process ends at once, and the cluster with it
    try:
        with cluster:
            if args.check:
                print(check(cluster), flush=True)
            if not args.command:
                return 0
            return cluster.run(args.command, args.controller, dict(args.env), capture=False).returncode
    except ClusterError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
