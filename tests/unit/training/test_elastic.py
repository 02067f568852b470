"""Workers of a data-parallel job: what torchrun is asked for, and real jobs of two processes on a CPU."""

import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import stub_recipe
from torch.distributed.elastic.utils import macros
from torch.distributed.run import get_args_parser

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import elastic

JOB = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", elastic.LAUNCHER_PID)


@pytest.fixture(autouse=True)
def world(monkeypatch):
    for name in [*os.environ]:
        if name in JOB or name.startswith("PET_"):
            monkeypatch.delenv(name)


def parsed(arguments=("train", "x.yaml")):
    return get_args_parser().parse_args(elastic.torchrun_arguments(3, arguments, "logs"))


def test_workers_meet_on_this_host_at_a_port_of_their_own():
    args = parsed()
    assert (args.nproc_per_node, args.nnodes, args.log_dir) == ("3", "1", "logs")
    assert (args.rdzv_backend, args.rdzv_endpoint, args.local_addr) == ("c10d", "127.0.0.1:0", "127.0.0.1")


def test_a_worker_is_a_module_of_this_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/env/bin", "/env/site-packages"])
    args = parsed(["train", "x.yaml", "--a.b", "2"])
    assert args.no_python
    assert args.training_script == sys.executable
    assert args.training_script_args == ["-P", "-u", "-m", "nemo_eagle3_sglang", "train", "x.yaml", "--a.b", "2"]


@pytest.mark.parametrize("entry", ["", os.getcwd()])
def test_a_worker_looks_in_the_working_folder_where_this_process_does(monkeypatch, entry):
    monkeypatch.setattr(sys, "path", [entry, "/env/site-packages"])
    assert "-P" not in parsed().training_script_args


def test_overrides_arrive_as_they_were_written():
    words = ["--a=${local_rank}", "--b=$$x$", "--c=${HOME}", "--nnodes=5", "-h"]
    assert macros.substitute(parsed(words).training_script_args, "1")[-len(words) :] == words


def test_address_and_port_of_the_user(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert (parsed().rdzv_endpoint, parsed().local_addr) == ("localhost:0", "localhost")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert parsed().rdzv_endpoint == f"localhost:{port}"
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setattr(elastic, "_check_can_meet", lambda *where: None)  # not every host has IPv6
    assert (parsed().rdzv_endpoint, parsed().local_addr) == (f"[::1]:{port}", "::1")


@pytest.mark.parametrize("name", elastic.RENDEZVOUS_VARIABLES)
def test_torchruns_own_variables_are_left_to_torchrun(monkeypatch, name):
    monkeypatch.setenv(name, "there:1")
    arguments = elastic.torchrun_arguments(3, ["train"], "logs")
    assert not any(argument.startswith(("--rdzv", "--nnodes", "--local-addr")) for argument in arguments)


def test_a_taken_port_is_an_error(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+: .*in use.*unset both"):
            elastic.torchrun_arguments(2, [], "logs")


@pytest.mark.parametrize("port", ["abc", "99999999"])
def test_a_port_that_cannot_be_is_an_error(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port}: .*cannot meet there"):
        elastic.torchrun_arguments(2, [], "logs")


# The second belongs to a network for documentation, so to no host.
@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_of_another_host_is_an_error(monkeypatch, address):
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(ConfigError, match=f"MASTER_ADDR={address}, .*cannot meet there"):
        elastic.torchrun_arguments(2, [], "logs")


def test_a_worker_whose_launcher_is_gone_ends(monkeypatch):
    calls = []
    libc = SimpleNamespace(prctl=lambda *args: calls.append(args))
    monkeypatch.setattr(elastic.ctypes, "CDLL", lambda *args, **kwargs: libc)
    elastic.end_with_launcher()
    assert calls == []
    monkeypatch.setenv(elastic.LAUNCHER_PID, str(os.getppid()))
    elastic.end_with_launcher()
    assert calls == [(1, signal.SIGKILL)]
    assert elastic.LAUNCHER_PID not in os.environ
    monkeypatch.setenv(elastic.LAUNCHER_PID, "1234567890")
    with pytest.raises(SystemExit, match="launcher"):
        elastic.end_with_launcher()


# The recipe resolves variables itself, so it must see them as written; torchrun has a meaning of its own for this one.
OPTIONS = ("--nproc-per-node", "2", "--recipe_args.output_dir=${local_rank}")
LINES = [f"rank {rank} of 2 at 127.0.0.1: ${{local_rank}}" for rank in (0, 1)]


class Job:
    """``nemo-eagle3-sglang train`` of the stub recipe in two processes."""

    def __init__(self, folder, do=None, start=("-m", "nemo_eagle3_sglang", "train"), options=OPTIONS):
        self.folder = folder
        config, env = stub_recipe.write(folder)
        env |= {"local_rank": "a variable of the user's"} | ({} if do is None else {"STUB_DO": do})
        command = [sys.executable, *start, str(config), *options]
        self.launcher = subprocess.Popen(
            command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self):
        """Return (status, stdout, stderr) once the launcher and all workers have ended."""
        out, err = self.launcher.communicate(timeout=100)
        assert gone_within(10, self.workers()), "workers were left behind"
        return self.launcher.returncode, out, err

    def workers(self):
        return [int(path.read_text()) for path in sorted(self.folder.glob("*.pid"))]

    def wait_until_both_run(self):
        deadline = time.monotonic() + 100
        while len([path for path in self.folder.glob("*.pid") if path.read_text()]) < 2:
            assert time.monotonic() < deadline
            assert self.launcher.poll() is None, self.launcher.communicate()
            time.sleep(0.1)


def gone_within(seconds, pids):
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def test_two_processes_train(tmp_path):
    status, out, err = Job(tmp_path).end()
    assert (status, sorted(out.splitlines())) == (0, LINES)
    assert err == "Loading NeMo AutoModel and its libraries, about 20 seconds ...\n"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("do", "status", "last"),
    [
        ("all ranks refuse", 2, "error: nobody can do this"),
        ("rank 1 refuses", 2, "[rank 1] error: I cannot do this"),
        (
            "rank 1 is killed",
            1,
            "error: the process of rank 1 was ended by SIGKILL, its output is above; the others were ended",
        ),
        ("rank 1 crashes", 1, "error: the process of rank 1 failed, its output is above; the others were ended"),
    ],
)
def test_a_rank_that_fails_ends_the_job_with_its_error(tmp_path, do, status, last):
    done, out, err = Job(tmp_path, do).end()
    _, *lines = err.splitlines()
    assert (done, sorted(out.splitlines()), lines[-1]) == (status, LINES, last)
    if do == "rank 1 crashes":
        assert lines[-2] == "[rank1]: RuntimeError: boom"
    else:
        assert len(lines) == 1
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status", "last"),
    [
        (signal.SIGINT, 130, "error: ended by SIGINT, and all 2 processes with it"),
        (signal.SIGTERM, 143, "error: ended by SIGTERM, and all 2 processes with it"),
        (signal.SIGKILL, -9, "Loading NeMo AutoModel and its libraries, about 20 seconds ..."),
    ],
)
def test_a_signal_to_the_launcher_ends_all_workers(tmp_path, number, status, last):
    job = Job(tmp_path, "wait")
    job.wait_until_both_run()
    job.launcher.send_signal(number)
    done, _, err = job.end()
    assert (done, err.splitlines()[-1]) == (status, last)
    assert "Traceback" not in err


def test_under_torchrun_each_worker_trains_and_starts_none(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", "2")
    status, out, err = Job(tmp_path, start=(*torchrun, "-m", "nemo_eagle3_sglang", "train"), options=()).end()
    assert (status, sorted(out.splitlines())) == (0, [f"rank {rank} of 2 at 127.0.0.1: out" for rank in (0, 1)])
    assert err.count("Loading NeMo AutoModel") == 1
