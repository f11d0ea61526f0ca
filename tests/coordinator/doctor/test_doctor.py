"""Tests `lockstep doctor`: every check passes on this host and fails on the problem that it looks for."""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.types.v1 import types_pb2
from lockstep.types.v1.types_pb2 import ServiceInfo
from typer.testing import CliRunner

from services.common import process as sockets
from services.common.config.sft import SftConfig
from services.common.errors import InvalidInput, Unavailable
from services.common.rpc import address as ports
from services.common.rpc.server import Server
from services.common.rpc.tls import Role
from services.common.weights import trial
from services.coordinator.cli.main import app, main
from services.coordinator.clients import gpus as devices
from services.coordinator.doctor import Finding, host, session
from services.coordinator.doctor import services as running
from services.coordinator.doctor.inputs import check_environment, examine_environment, examine_inputs
from services.coordinator.doctor.services import (
    Answer,
    check_agreement,
    check_answer,
    check_broadcast,
    check_clock,
    examine_services,
)
from services.coordinator.fleet.launch import Addresses
from services.coordinator.runs import ledger
from services.reward.servicer import NAME, RewardServicer
from tests.common.rpc.tls_harness import Certificates, serve
from tests.coordinator.doctor.findings import FAIL, OK, WARN, assert_fails, config_with
from tests.coordinator.fake_services import make_config
from tests.small_disk import small_disk
from tests.support import PATIENCE_S, ROOT, free_port

SETUP = "make setup-gpu"
GIB = 2**30


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "cpu.txt"
    lock.write_text("# all\nnumpy==0.0.1 \\\n    --hash=sha256:1\nnot-installed==1.0\n")
    assert_fails(host.check_packages([lock], SETUP), WARN, "numpy", "tested versions from cpu.txt")
    lock.write_text("not-installed==1.0\n")
    assert host.check_packages([lock], SETUP).verdict is OK
    for name in ("rollout-cuda.txt", "trainer-cuda.txt"):  # one of them is installed
        (tmp_path / name).write_text(f"numpy=={version('numpy') if name[0] == 't' else '0.0.1'}\n")
    assert host.check_packages(sorted(tmp_path.glob("*-cuda.txt")), SETUP).verdict is OK
    assert_fails(host.check_packages([], SETUP), WARN, "no lock file to compare", "lock")
    some = [one for one in host.distributions() if one.name.lower() not in ("grpcio", "pyarrow")]
    monkeypatch.setattr(host, "distributions", lambda: some)
    assert_fails(host.check_packages([lock], SETUP), FAIL, "missing: grpcio, pyarrow", SETUP)


def test_torch() -> None:
    assert host.check_torch(0).verdict is OK
    assert_fails(host.check_torch(2), FAIL, "cannot use the 2 GPUs", "CUDA")


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config, none = config_with(trainer={"num_ranks": 2}), Addresses()
    assert host.check_gpus(config, none, []).verdict is OK
    assert host.check_gpus(config, none, ["0", "1", "2"]).verdict is OK
    assert_fails(host.check_gpus(config, none, ["0", "1"]), FAIL, "2", "need 3")
    assert host.check_gpus(config, Addresses(trainer="a:1"), ["0", "1"]).verdict is OK
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert host.check_gpus(None, none, ["5"]).result == "1 (CUDA_VISIBLE_DEVICES=5)"


def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    findings = {finding.check: finding for finding in host.examine_host(None, Addresses(reward=("a:1",)))}
    assert_fails(findings["GPUs"], FAIL, "unknown", "CUDA_VISIBLE_DEVICES=0,1: this host has 1 GPUs")
    assert "torch" not in findings  # the expected findings depend on the host
    assert "disk" in findings


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fails(host.check_shared_memory(tmp_path / "none"), FAIL, "not mounted", "tmpfs")
    for free, verdict in ((2 * GIB, OK), (GIB // 2, WARN), (GIB // 32, FAIL)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(total=2 * GIB, free=free))
        finding = host.check_shared_memory(tmp_path)
        assert (finding.verdict, bool(finding.fix)) == (verdict, verdict is not OK)


def test_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_sockets().verdict is OK
    assert "sockets" in {finding.check for finding in host.examine_host(None, Addresses(reward=("a:1",)))}
    (long := tmp_path / ("d" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert host.check_sockets().result == "in /tmp"
    monkeypatch.setattr(sockets, "_SHORT_PLACES", ())
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert_fails(host.check_sockets(), FAIL, "cannot be made", "set TMPDIR to a directory")


def test_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "ip_local_port_range"
    local.write_text("32768\t60999\n")
    assert host.check_ports(2, local).verdict is OK
    local.write_text("1024\t60999\n")
    assert_fails(host.check_ports(2, local), WARN, "1024 to 60999", "ip_local_port_range='32768 60999'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        assert_fails(host.check_ports(1, local), FAIL, "is free", "stop the processes that listen")


def test_a_ledger_in_runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"write-ahead log in {tmp_path}" in host.check_ledger(tmp_path / "not" / "yet").result
    for module in (host, ledger):
        monkeypatch.setattr(module, "is_shared", lambda path: True)
    assert "network file system" in host.check_ledger(tmp_path).result
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(host, "has_local_locks", lambda path: True)
    assert_fails(host.check_ledger(tmp_path), FAIL, "NFS whose locks other hosts do not see", "NFS 4")
    with small_disk(tmp_path / "disk") as disk:
        disk.make_read_only()
        assert_fails(host.check_ledger(disk.path), FAIL, "Read-only", "set runs_dir to a local disk")


def test_sandbox() -> None:
    broken = ("-c", "import sys; sys.exit('bwrap: no namespaces')")
    assert_fails(host.check_sandbox(None, broken), WARN, "bwrap: no namespaces", "bubblewrap")
    code = config_with(reward={"scorers": [{"kind": "code"}], "group_timeout_s": 1.0})
    assert_fails(host.check_sandbox(code, broken), FAIL, "bwrap: no namespaces", "bubblewrap")
    assert host.check_sandbox(code, ("-c", "print('{}')")).verdict is OK
    tools = config_with(environment={"kind": "tools", "tools": [{"kind": "python"}]})
    assert host.check_sandbox(tools, broken).verdict is FAIL
    tools = config_with(environment={"kind": "tools", "tools": [{"kind": "calculator"}]})
    assert host.check_sandbox(tools, broken).verdict is WARN


def opened(environment: dict[str, object], *command: str, **options: Any) -> Finding:
    section = config_with(environment=environment).environment
    assert section is not None
    return check_environment(section, *([command] if command else []), **options)


def test_environment() -> None:
    finding = opened({"kind": "tools", "tools": [{"kind": "calculator"}]})
    assert (finding.verdict, finding.result) == (OK, "tools 1/calculator-1 opens, tools calculator")
    guess = {"kind": "python", "path": "tests.reward.environments.user_environments:Guess", "kwargs": {"bottom": 1}}
    assert_fails(opened(guess), FAIL, "unexpected keyword argument 'bottom'", "environment.kwargs")
    finding = opened({"kind": "textarena", "game": "G-v0"}, "-c", "import sys; sys.exit('No module named textarena')")
    assert_fails(finding, FAIL, "No module named textarena", "lockstep-rl[environments]")


@pytest.mark.long
def test_each_kind_of_environment_has_a_fix_of_its_own(tmp_path: Path) -> None:
    search = {"kind": "search", "corpus": str(tmp_path / "none.parquet")}
    finding = opened({"kind": "tools", "tools": [search]})
    assert_fails(finding, FAIL, "none.parquet", "their files and packages")
    finding = opened({"kind": "python", "path": "no_such_module:Game"})
    assert_fails(finding, FAIL, "no_such_module", "from which the module can be imported")
    finding = opened({"kind": "openenv", "url": f"ws://127.0.0.1:{free_port()}/ws"})
    assert_fails(finding, FAIL, "no connection to ws://127.0.0.1", "start the OpenEnv server")


def test_an_environment_that_does_not_open_in_time_may_only_be_slow() -> None:
    waits = "import threading; threading.Event().wait()"
    assert_fails(
        opened({"kind": "python", "path": "m:C"}, "-c", waits, timeout_s=0.01), WARN, "within 0.01 s", "corpus"
    )


def test_an_environment_is_opened_where_its_reward_service_will_run() -> None:
    config = config_with(environment={"kind": "tools", "tools": [{"kind": "calculator"}]})
    assert [finding.verdict for finding in examine_environment(config, Addresses())] == [OK]
    (finding,) = examine_environment(config, Addresses(reward=("a:1",)))
    assert "where the reward services do" in finding.result
    assert not list(examine_environment(config_with(), Addresses()))


def test_an_environment_whose_messages_the_model_cannot_read_fails() -> None:
    def talks(opened: Mapping[str, object], _: object) -> None:
        assert opened["roles"] == ["tool"]
        raise InvalidInput("the chat template leaves out messages of role tool", field="data.chat_template")

    section = {"kind": "tools", "tools": [{"kind": "calculator"}]}
    assert_fails(opened(section, talks=talks), FAIL, "leaves out messages", "correct data.chat_template")


def test_the_probe_of_the_sandbox_says_why_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_fails(host.check_sandbox(None), WARN, "bwrap not found: install bubblewrap", "bubblewrap")


def test_model_and_data(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", "1+2="] * 8, "answer": ["2", "3"] * 8}), file)
    data = {"train": file, "eval": {"few": file}, "prompts_per_step": 8}
    attention, model, found, first, steps = examine_inputs(config_with(data=data), Addresses())
    assert (attention.check, attention.verdict) == ("attention", OK)
    held_out = "16 prompts, 16 held out in few"
    never = f"{held_out}; not evaluated after a step: evaluation.eval_freq is 0"
    assert (model.verdict, found.verdict, found.result) == (OK, OK, never)
    _, _, found, *_ = examine_inputs(config_with(data=data, evaluation={"eval_freq": 5}), Addresses())
    assert found.result == held_out
    assert first.result.endswith("tokens: '1+1='; answer: '2'")
    assert steps.result == "100 steps read 800 prompts, 50 epochs, if every one is used"

    _, model, found = examine_inputs(config_with(data=data | {"train": "/nope.parquet"}), Addresses())
    assert model.verdict is OK
    assert_fails(found, FAIL, "data.train: /nope.parquet does not exist", "correct data.train, or the rows of")
    without = shutil.copytree(config_with().model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer.json"))
    *_, found = examine_inputs(make_config(model=str(without), data=data), Addresses())
    assert_fails(found, FAIL, "has no tokenizer: none of tokenizer", "set model to a directory that has the files")
    elsewhere = make_config(model="/nope", data=data)
    model, found = examine_inputs(elsewhere, Addresses())
    assert_fails(model, FAIL, "/nope does not exist", "directory")
    assert_fails(found, WARN, "not read", "above")
    (model,) = examine_inputs(elsewhere, Addresses(trainer="a:1"))
    assert (model.verdict, "not on this host" in model.result) == (OK, True)
    megatron = {"strategy": "megatron", "num_ranks": 64, "megatron": {"tensor_model_parallel_size": 64}}
    model, *_ = examine_inputs(config_with(data=data, trainer=megatron), Addresses())
    assert_fails(model, FAIL, "tensor_model_parallel_size 64", "correct trainer.")


def test_a_model_without_all_its_weights_fails(tmp_path: Path) -> None:
    def examined(directory: Path, given: Addresses) -> Finding:
        found, *_ = examine_inputs(make_config(model=str(directory)), given)
        return found

    model = Path(shutil.copytree(ROOT / "deploy" / "quickstart" / "model", tmp_path / "snapshots" / "model"))
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert_fails(examined(model, Addresses()), FAIL, f"{weights} is not a whole safetensors file", "model")
    assert examined(model, Addresses(trainer="a:1")).verdict is OK  # the trainer's host has its own copy
    weights.unlink()
    assert examined(model, Addresses()).verdict is OK  # in the Hub's cache: the run downloads them
    model = model.rename(tmp_path / "model")
    assert_fails(examined(model, Addresses()), FAIL, f"{model} has no model.safetensors", "model")


def test_rows_of_a_supervised_run(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", "1+2="] * 8, "response": ["2", "3"] * 8}), file)
    tree = {
        "model": str(ROOT / "deploy" / "quickstart" / "model"),
        "data": {"train": str(file), "eval": {"few": str(file)}, "samples_per_step": 8, "end_token": "<eos>"},
        "trainer": {},
        "num_steps": 1,
        "evaluation": {"eval_freq": 1},
    }
    _, model, found, first, steps = examine_inputs(SftConfig.model_validate(tree), Addresses())
    assert (model.verdict, found.verdict, found.result) == (OK, OK, "16 rows, 16 held out in few")
    assert first.result.endswith("tokens: '1+1='; trained on: '2<eos>'")
    assert steps.result == "1 step reads 8 rows, 0.5 epochs, if every one is used"
    checks = {one.check: one.result for one in host.examine_host(SftConfig.model_validate(tree), Addresses())}
    assert "sandbox" not in checks and "no lock file" not in checks["packages"]  # and there is no reward service


@pytest.mark.parametrize("command", ["run", "sft"])
def test_a_dry_run_checks_and_starts_nothing(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, runs = tmp_path / "train.parquet", tmp_path / "runs"
    pq.write_table(pa.table({"prompt": ["1+1="] * 8, "answer": ["2"] * 8, "response": ["2"] * 8}), file)
    tree: dict[str, object] = {"model": str(ROOT / "deploy" / "quickstart" / "model"), "num_steps": 1}
    data = {"train": str(file), "max_tokens": 32, "samples_per_step": 8, "end_token": "<eos>"}
    if command == "run":
        data = {"train": str(file), "max_prompt_tokens": 16, "prompts_per_step": 8}
        tree["reward"] = {"scorers": [{"kind": "exact"}]}
        tree["rollout"] = {"max_model_len": 32, "sampling": {"max_tokens": 16}}
    tree |= {"data": data, "runs_dir": str(runs), "trainer": {"max_tokens_per_microbatch": 64}}
    (tmp_path / "run.yaml").write_text(json.dumps(tree))

    def dry_run(*more: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [command, str(tmp_path / "run.yaml"), "--dry-run", *more])
        return done.exit_code, done.output

    code, output = dry_run()
    assert (code, "steps" in output, runs.exists()) == (0, True, False), output
    code, output = dry_run(f"data.train={tmp_path}/none.parquet")
    assert (code, "does not exist" in output) == (1, True), output
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, output = dry_run("model=models/none")  # it may be on the Hub
    words = " ".join(output.split())
    assert code == 1 and "models/none, which is not a directory here, was" in words, output
    assert "fix: download the model" in words and "restart" in words, output  # the other checks went on
    assert not runs.exists()


@pytest.fixture
async def reward() -> AsyncIterator[str]:
    """Yields the address of a real reward service."""
    server, servicer = Server(), RewardServicer()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("127.0.0.1:0", [NAME])
    yield f"127.0.0.1:{port}"
    await server.grpc.stop(0)


async def test_services(reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_SLOW_S", PATIENCE_S)  # this machine may be busy
    monkeypatch.setattr(running, "_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(running, "_SKEW_WARN_S", PATIENCE_S)
    answered, clock = await examine_services(Addresses(reward=(reward,)))
    assert (answered.verdict, clock.verdict) == (OK, OK)
    assert "idle" in answered.result and "no run" in answered.result
    nobody = f"127.0.0.1:{free_port()}"
    wrong, lost, untried = await examine_services(Addresses(trainer=reward, rollout=(nobody,)))
    (critic,) = await examine_services(Addresses(critic=reward))
    assert critic.check == f"critic {reward}"
    for found in (wrong, critic):
        assert_fails(found, FAIL, f"{reward} is not a trainer service", "swapped")
    assert_fails(lost, FAIL, nobody, "start the service")
    assert_fails(untried, WARN, f"not tried: no answer from trainer {reward}, rollout {nobody}", "above")


async def test_service_that_wants_certificates(tmp_path: Path) -> None:
    server, address = await serve(Certificates(tmp_path).of(Role.REWARD))
    (finding,) = await examine_services(Addresses(reward=(address,)))
    assert_fails(finding, FAIL, "the service requires mTLS: pass --tls", "certificates")
    await server.grpc.stop(None)


def test_answers_clocks_and_versions() -> None:
    info = ServiceInfo(state="open", run_id="r", version="1", time_ns=1)
    assert_fails(check_answer("trainer a:1", Unavailable("gone")), FAIL, "gone", "firewall")
    assert check_answer("trainer a:1", Answer(info, 0.001, 0)).verdict is OK
    assert_fails(check_answer("trainer a:1", Answer(info, 0.2, 0)), WARN, "200.0 ms", "lower latency")
    for ahead_s, verdict in ((0.1, OK), (-2, WARN), (3600, FAIL)):
        finding = check_clock("trainer a:1", Answer(info, 0.001, ahead_s))
        assert (finding.verdict, bool(finding.fix)) == (verdict, verdict is not OK)

    infos = {
        "trainer a:1": ServiceInfo(version="1", libraries={"torch": "2.13", "nccl": "2.27.3"}),
        "rollout b:1": ServiceInfo(version="1", libraries={"torch": "2.12", "nccl": "2.28.9"}),
    }
    found = {finding.check: finding for finding in check_agreement(infos)}
    assert found["lockstep-rl versions"].verdict is OK
    assert_fails(found["nccl versions"], FAIL, "2.27.3 in trainer a:1; 2.28.9 in rollout b:1", "same nccl")
    assert_fails(found["torch versions"], WARN, "2.12 in rollout b:1", "same torch")
    assert "cuda versions" not in found


@pytest.mark.slow
async def test_broadcast() -> None:
    assert_fails(await check_broadcast(timeout_s=PATIENCE_S), OK, "64 MiB in", "")
    dead = await check_broadcast(("-c", "raise SystemExit('no gloo here')"))
    assert_fails(dead, FAIL, "no gloo here", "gloo")


@pytest.mark.long
async def test_a_broadcast_of_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wrong(group: object, rank: int) -> types_pb2.TestBroadcast:
        return types_pb2.TestBroadcast(digest=str(rank), num_bytes=1 << 20, duration_s=1)

    monkeypatch.setattr(trial, "take_part", wrong)
    assert_fails(await check_broadcast(), FAIL, "sent 0, received 1", "gloo")


def test_the_exit_code_is_1_if_anything_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def warned() -> Finding:
        return Finding("broadcast", "[b]fast", WARN, "wait")

    monkeypatch.setattr(session, "examine_host", lambda config, given: [Finding("Python", "3")])
    monkeypatch.setattr(session, "check_broadcast", warned)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0 and "[b]fast" in done.output and "fix: wait" in done.output
    nowhere = ["model=/nope", "data.train=x.parquet", "data.prompts_per_step=1", "reward.scorers=[{kind: exact}]"]
    done = CliRunner().invoke(app, ["doctor", *nowhere])
    assert done.exit_code == 1 and "/nope does not exist" in done.output
    done = CliRunner().invoke(app, ["doctor", "--trainer", f"127.0.0.1:{free_port()}"])
    assert done.exit_code == 1 and "fail" in done.output


def test_an_interrupted_command_says_that_it_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "examine", interrupt)
    monkeypatch.setattr(sys, "argv", ["lockstep", "doctor"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, "lockstep: stopped\n")
