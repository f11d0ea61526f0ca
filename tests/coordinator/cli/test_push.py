"""Tests `lockstep push`: the Hub gets the files of an exported model, and errors are one line."""

from pathlib import Path

from tests.coordinator.data.fake_hub import asking, hub
from tests.support import ROOT

MODEL = ROOT / "deploy" / "quickstart" / "model"
# Answers with the exit code and the output.
PROGRAM = """
import contextlib, io, os, sys
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
from services.coordinator.cli.main import main
def answer(token, *arguments):
    os.environ["HF_TOKEN"], sys.argv = token, ["lockstep", "push", *arguments]
    code, output = 0, io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return f"{code} {output.getvalue()}"
"""


def test_a_model_is_pushed_and_what_is_in_the_way_is_one_line(tmp_path: Path) -> None:
    pushed: dict[str, bytes] = {}
    to = str(MODEL), "openai/gsm8k"
    with hub({}, pushed) as endpoint, asking(PROGRAM, endpoint, tmp_path) as ask:
        done = ask("may-write", *to)
        assert done.startswith(f"0 pushed {endpoint}/openai/gsm8k/commit/"), done
        refused = ask("other", *to)
        no_model = ask("may-write", str(tmp_path), "openai/gsm8k")
        (tmp_path / "config.json").write_text("{}")
        no_weights = ask("may-write", str(tmp_path), "openai/gsm8k")
        (tmp_path / "model").mkdir()
        of_a_run = ask("may-write", str(tmp_path), "openai/gsm8k")
    assert pushed == {path.name: path.read_bytes() for path in MODEL.iterdir()}
    with asking(PROGRAM, endpoint, tmp_path) as ask:
        unreachable = ask("may-write", *to)
    for said, words in [
        (refused, "INVALID_INPUT: you cannot write openai/gsm8k on the Hugging Face Hub ("),
        (unreachable, "UNREACHABLE: the Hugging Face Hub is unreachable ("),
        (no_model, f"NOT_FOUND: {tmp_path} has no config.json: give runs/NAME/model or an export"),
        (no_weights, f"NOT_FOUND: {tmp_path} has no *.safetensors: give runs/NAME/model or an export"),
        (of_a_run, f"NOT_FOUND: {tmp_path} has no *.safetensors: give {tmp_path}/model"),
    ]:
        assert said.startswith(f"2 lockstep: error: {words}") and said.count("\n") == 1, said
