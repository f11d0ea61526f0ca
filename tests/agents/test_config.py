"""Tests what a config of an agent refuses."""

from pathlib import Path

import pytest

from services.common.config.load import load
from services.common.config.run import Config
from services.common.errors import InvalidInput

_AGENT = "environment={kind: agent, path: 'm:run'}"
RULES = {
    "an agent gives no rewards": ([_AGENT, "reward.scorers=[]"], ["reward.scorers", "at least one"], [_AGENT]),
    "segments have no ratio of a sample": (
        [_AGENT, "trainer.loss.kind=gspo"],
        ["trainer.loss.kind gspo", "segments"],
        [_AGENT, "trainer.loss.kind=cispo"],
    ),
    "segments have no geometric mean of a sample": (
        [_AGENT, "trainer.loss.kind=gmpo"],
        ["trainer.loss.kind gmpo", "segments"],
        [_AGENT, "trainer.loss.kind=grpo"],
    ),
    "segments have no correction of a sample": (
        [_AGENT, "trainer.loss.correction={veto: 0.1}"],
        ["correction.veto"],
        [_AGENT, "trainer.loss.correction={weight: token}"],
    ),
    "an agent is a command or a function": (
        ["environment={kind: agent, path: 'm:run', command: [a]}"],
        ["either command or path"],
        ["environment={kind: agent, command: [a]}"],
    ),
    "an agent is one thing": (
        ["environment={kind: agent, url: 'https://agent.lab/', command: [a]}"],
        ["either command or path, or url"],
        ["environment={kind: agent, url: 'https://agent.lab/', port: 8443}"],
    ),
    "a key goes over no network in the clear": (
        ["environment={kind: agent, url: 'http://agent.lab/'}"],
        ["url", "unencrypted", "https"],
        ["environment={kind: agent, url: 'http://127.0.0.1:8000/'}"],
    ),
    "a URL is one of HTTP": (
        ["environment={kind: agent, url: 'https://me:secret@agent.lab/'}"],
        ["url", "credentials"],
        ["environment={kind: agent, url: 'https://agent.lab/'}"],
    ),
    "only agents elsewhere have a port": (
        ["environment={kind: agent, path: 'm:run', port: 8443}"],
        ["port", "url"],
        ["environment={kind: agent, path: 'm:run'}"],
    ),
    "a function has no sandbox": (
        ["environment={kind: agent, path: 'm:run', collect: ['*']}"],
        ["collect", "sandbox"],
        ["environment={kind: agent, command: [a], collect: ['*']}"],
    ),
    "files of an agent are below its places": (
        ["environment={kind: agent, command: [a], files: {'../x': y}}"],
        ["../x", "/workspace"],
        ["environment={kind: agent, command: [a], files: {'~/x': y}}"],
    ),
    **{
        f"collected files are below the workspace: {pattern}": (
            [f"environment={{kind: agent, command: [a], collect: ['{pattern}']}}"],
            ["collect", "relative to /workspace"],
            ["environment={kind: agent, command: [a], collect: ['out/**', '**/*.txt', '*']}"],
        )
        for pattern in ("/workspace/*.txt", "../*", "", ".", "a**/b")
    },
    "columns of an agent are there": (
        ["environment={kind: agent, path: 'm:run', columns: [level]}", "data.extra_columns=[other]"],
        ["environment.columns", "level"],
        ["environment={kind: agent, path: 'm:run', columns: [level]}", "data.extra_columns=[level]"],
    ),
    "an agent sends its own system prompt": (
        [_AGENT, "data.system_prompt=Be brief.", "data.chat=true"],
        ["data.system_prompt", "agent"],
        [_AGENT, "data.chat_template_kwargs={enable_thinking: false}", "data.chat=true"],
    ),
    "agents give no rewards": (
        [_AGENT, "selection.dynamic={enabled: true, component: environment}"],
        ["selection.dynamic.component", "exact"],
        [_AGENT, "selection.dynamic={enabled: true, component: exact}"],
    ),
    "a file of the code scorer": (
        ["reward.scorers=[{kind: code, file: a.py}]"],
        ["reward.scorers", "agent"],
        ["reward.scorers=[{kind: code, file: a.py}]", "environment={kind: agent, command: [a], collect: ['*.py']}"],
    ),
    "a file that no pattern collects": (
        ["reward.scorers=[{kind: code, file: a.py}]", "environment={kind: agent, command: [a], collect: ['*.patch']}"],
        ["file a.py", "environment.collect", "[a.py]"],
        ["reward.scorers=[{kind: code, file: a.py}]", "environment={kind: agent, command: [a], collect: ['**/*.py']}"],
    ),
    "a file of an agent that is no command": (
        ["reward.scorers=[{kind: code, file: a.py}]", _AGENT],
        ["file a.py", "environment.command"],
        ["reward.scorers=[{kind: code, file: b/a.py}]", "environment={kind: agent, command: [a], collect: ['b/**']}"],
    ),
    "a file's name": (
        ["reward.scorers=[{kind: code, file: ./a.py}]", "environment={kind: agent, command: [a], collect: ['*.py']}"],
        ["./a.py", "write a.py"],
        ["reward.scorers=[{kind: code, file: a.py}]", "environment={kind: agent, command: [a], collect: [a.py]}"],
    ),
    "tools give no rewards": (
        ["environment={kind: tools, tools: [{kind: function, path: 'm:f'}]}", "reward.scorers=[]"],
        ["reward.scorers", "kind tools gives no rewards"],
        ["environment={kind: tools, tools: [{kind: function, path: 'm:f'}]}"],
    ),
    "a prompt's only sample": (
        ["advantage={kind: reinforce_plus_plus, whiten: group}", "rollout.completions_per_prompt=1"],
        ["advantage.whiten", "rollout.completions_per_prompt"],
        ["advantage={kind: reinforce_plus_plus, whiten: batch}", "rollout.completions_per_prompt=1"],
    ),
    "rows of agents fit unevenly": (
        [_AGENT, "trainer.num_ranks=2", "rollout.max_model_len=8192", "trainer.max_tokens_per_microbatch=8192"],
        ["number of an agent's rows", "trainer.max_tokens_per_microbatch"],
        [_AGENT, "trainer.num_ranks=2", "rollout.max_model_len=8192", "trainer.max_tokens_per_microbatch=16384"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_refuses_the_wrong_and_takes_the_nearest_right_value(tmp_path: Path, rule: str) -> None:
    wrong, words, right = RULES[rule]
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: {train: x.parquet, prompts_per_step: 8}\nreward: {scorers: [{kind: exact}]}\n")
    with pytest.raises(InvalidInput) as caught:
        load(Config, [str(file), *wrong])
    assert all(word in caught.value.message for word in words), caught.value.message
    load(Config, [str(file), *right])
