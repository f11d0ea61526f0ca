"""Tests `lockstep env try` and the checks of `lockstep doctor` with agents."""

import json
import ssl
import threading
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner, Result

from services.common.errors import InvalidInput
from services.common.rpc.tls import CA_FILE, Role
from services.coordinator.cli import certs, groups
from services.coordinator.cli.main import app
from services.coordinator.doctor import Verdict
from services.coordinator.doctor.inputs import examine_environment
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.console import literal_console
from tests.agents.harness import END, make_chat_tokenizer
from tests.agents.test_episodes import AGENTS, CALL
from tests.coordinator.doctor.findings import FAIL, OK, WARN, config_with
from tests.coordinator.text.bridge_families import TEMPLATES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model without weights, whose tokenizer has all characters."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = make_chat_tokenizer()
    tokenizer._backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    content = json.loads(Path(config_with().model, "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"vocab_size": len(tokenizer._backend.get_vocab())}))
    return directory


def tried(model: Path, *texts: str, options: Sequence[str] = (), **environment: Any) -> Result:
    pq.write_table(pa.table({"prompt": ["one", "two"], "answer": ["1", "2"]}), model / "train.parquet")
    data = {"train": str(model / "train.parquet"), "prompts_per_step": 2}
    content = {
        "model": str(model),
        "num_steps": 1,
        "data": {**data, "chat_template": str(TEMPLATES / "qwen2.5.jinja"), "max_prompt_tokens": 500},
        "rollout": {"max_model_len": 2000},
        "reward": {"scorers": [{"kind": "exact"}]},
        "environment": {"kind": "agent", **environment},
    }
    (model / "run.yaml").write_text(yaml.safe_dump(content))
    said = [word for text in texts for word in ("--policy-text", text)]
    return CliRunner().invoke(app, ["env", "try", str(model / "run.yaml"), "--row", "1", *said, *options])


@pytest.fixture(autouse=True)
def console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_console", literal_console())  # of the output that the runner puts in place


def test_the_calls_of_an_agent_are_shown_as_a_run_would_read_them(model: Path) -> None:
    done = tried(model, f"I add.\n{CALL}", "4", "short", "a", "b", "c", "d", path=f"{AGENTS}:compacts")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("agent 1/") and "prompt 1-" in lines[0]
    calls = [line.partition(":")[0] for line in lines if line.startswith("---")]
    assert calls == [
        *("--- call 0 begins a segment", "--- call 1 continues call 0", "--- call 2 continues call 1"),
        *(f"--- call {number} begins a segment" for number in (3, 4, 5, 6)),
        "--- 7 calls in 5 segments",
    ]
    assert lines[2:7] == [
        "[user] two",
        "[assistant] I add.",
        '[calls] add({"b": 5000.0, "a": "A/"})',
        lines[5],
        "[tool] 4",
    ]
    assert "tokens, tools add" in lines[1] and lines[-1] == "[final text] 4"


def test_what_an_agent_asks_in_vain_and_its_failure_are_shown(model: Path) -> None:
    done = tried(model, "hi", path=f"{AGENTS}:too_long")
    assert "--- call 0 is refused, context_length_exceeded: This model's maximum context length is " in done.stdout
    assert done.exit_code == 1 and "0 calls in 0 segments" in done.stdout, "a run trains no such episode"
    assert "no answer of the model (1 call refused" in done.stdout
    done = tried(model, "hi", path=f"{AGENTS}:crashes")
    assert done.exit_code == 1 and "environment: crashed: RuntimeError: a bug of the agent" in done.stdout
    done = tried(model, "hi", path=f"{AGENTS}:forgets")
    assert done.exit_code == 0 and done.stdout.rstrip().endswith("[no final text]"), "an outcome, but mostly a mistake"


@pytest.mark.long
def test_an_agent_that_wants_another_turn_than_it_gets_is_shown(model: Path) -> None:
    done = tried(model, "hi", path=f"{AGENTS}:compacts")
    assert done.exit_code == 1 and "environment: crashed" in done.stdout, "it wanted a call of its tool"
    done = tried(model, f"I add.\n{CALL}", path=f"{AGENTS}:compacts")
    assert done.exit_code == 0 and done.stdout.endswith("no more turns of the policy: the episode was left\n")


# Each asks a reward service of its own, which takes seconds to start.
@pytest.mark.parametrize(
    ("environment", "verdict", "words"),
    [
        ({"path": f"{AGENTS}:compacts"}, OK, f"{AGENTS}:compacts can be imported"),
        ({"path": f"{AGENTS}:no_such"}, FAIL, "no_such"),
        pytest.param({"path": f"{AGENTS}:user"}, FAIL, "row", marks=pytest.mark.long),
        ({"command": ["python", "agent.py"]}, OK, "bin/python, with openai and anthropic"),
        pytest.param({"command": ["cat"]}, OK, "its sandbox runs /usr/bin/cat", marks=pytest.mark.long),
        ({"command": ["no-such-agent"]}, FAIL, "the sandbox has no program no-such-agent"),
        ({"command": ["made"], "setup": ["true"]}, WARN, "no program made before environment.setup"),
        pytest.param({"command": ["cat"], "files": {"x": "/no/such"}}, FAIL, "/no/such", marks=pytest.mark.long),
        pytest.param(
            {"command": ["./own"], "files": {"own": __file__}}, OK, "its sandbox runs ./own", marks=pytest.mark.long
        ),
    ],
)
def test_doctor_says_what_an_agent_needs(environment: dict[str, Any], verdict: Verdict, words: str) -> None:
    config = config_with(environment={"kind": "agent", **environment}, reward={"scorers": [{"kind": "exact"}]})
    (finding,) = examine_environment(config, Addresses())
    assert (finding.verdict, words in finding.result) == (verdict, True), finding
    assert verdict is OK or finding.fix


def test_an_agent_elsewhere_is_tried_with_the_credentials_of_a_reward_service(model: Path, tmp_path: Path) -> None:
    certs.init(tmp_path / "ca")
    certs.issue(tmp_path / "ca", Role.REWARD, ["127.0.0.1"], tmp_path / "own")
    trust, asked = ssl.create_default_context(cafile=str(tmp_path / "own" / CA_FILE)), list[str]()

    class Agent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            episode = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(episode["url"])
            body = json.dumps({"messages": [{"role": "user", "content": episode["row"]["prompt"]}]}).encode()
            headers = {"Authorization": f"Bearer {episode['key']}"}
            request = urllib.request.Request(f"{episode['url']}/v1/chat/completions", body, headers)
            with urllib.request.urlopen(request, context=trust, timeout=60) as answer:
                text = json.load(answer)["choices"][0]["message"]["content"]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"text": text}).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        options = ["--tls", str(tmp_path / "own"), "--listen", "127.0.0.1"]
        done = tried(model, "four", options=options, url=f"http://127.0.0.1:{server.server_port}/episode")
        server.shutdown()
        serving.join()
    assert done.exit_code == 0 and "[final text] four" in done.stdout, done.output
    assert [url.partition(":")[0] for url in asked] == ["https"]
    away = tried(model, "four", url="https://agent.lab/episode")
    assert isinstance(away.exception, InvalidInput) and "start it with --tls" in away.exception.message
