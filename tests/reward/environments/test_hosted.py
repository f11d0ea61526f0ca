"""Tests games of textarena and tasks of reasoning-gym with the real packages."""

import asyncio
import json
import re
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from google.protobuf.message import Message

from services.common.errors import InvalidInput, Reason
from services.reward.environments import libraries
from services.reward.environments.libraries import Game, Task
from tests.support import raises

GUESS = {"kind": "textarena", "game": "GuessTheNumber-v0", "kwargs": {"min_number": 1, "max_number": 5}}
SUMS = {"kind": "reasoning_gym", "task": "chain_sum", "kwargs": {"min_terms": 2, "max_terms": 2}}


def _bytes(answer: Message) -> bytes:
    return answer.SerializeToString(deterministic=True)


def test_what_makes_a_library_raise_is_no_failure_of_the_environment() -> None:
    def raises_value_error(*_: object, **__: object) -> float:
        raise ValueError("invalid literal for int(): '2 x 3'")

    task = Task("prime_factorization", {})
    task._tasks, task._entry = SimpleNamespace(score_answer=raises_value_error), {"answer": "2 x 3"}
    assert task.step("<answer>2, 3</answer>") == (None, 0.0, True)
    for answer, own, score in (("nan", "1.0 + 2.0i", 0.0), ("nan", "nan", 1.0), ("banana", "1", 1.0)):
        task._tasks, task._entry = SimpleNamespace(score_answer=lambda *_: 1.0), {"answer": own}
        assert task.step(f"<answer>{answer}</answer>")[1] == score
    task._tasks = SimpleNamespace(score_answer=lambda *_: float("nan"))
    assert task.step("x")[1] == 0.0
    game = Game.__new__(Game)
    game._game, game._states = SimpleNamespace(step=raises_value_error), libraries._generators()
    assert game.step("[9]") == ("", -1.0, True)


class TestTextarena:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("textarena", reason="needs the extra `environments`", exc_type=ImportError)

    async def test_a_game_is_won_by_who_listens(self, service):
        opened = await service.open(**GUESS)
        assert opened.environment.startswith("textarena 1/textarena-0.7")
        rules = (await service.reset()).messages
        assert len(rules) == 1 and "between 1 and 5" in rules[0].content
        low, high, turn = 1, 5, 0
        while True:
            guess = (low + high) // 2
            answer = await service.step(turn, f"I say [{guess}]")
            if answer.done:
                break
            hint = answer.messages[0].content
            assert answer.reward == 0 and "I say" not in hint and "between 1 and 5" not in hint
            low, high, turn = (guess + 1, high, turn + 1) if "higher" in hint else (low, guess - 1, turn + 1)
        assert answer.reward == 1.0

    async def test_a_move_that_is_only_considered_is_not_made(self, service):
        await service.open(**GUESS)
        await service.reset()
        answer = await service.step(0, "<think>[1] or [2] would be a move.</think> I pass.")
        assert "invalid move" in answer.messages[0].content

    async def test_two_invalid_moves_end_the_game(self, service):
        await service.open(**GUESS)
        await service.reset()
        first, second = await service.step(0, "no idea"), await service.step(1, "no idea")
        assert (first.done, second.done) == (False, True)
        assert "invalid move" in first.messages[0].content
        assert second.reward < 1

    async def test_a_seed_gives_the_same_game_whatever_else_is_played(self, service):
        """Tests games that draw at random: 2048 draws a tile after each move, Sokoban draws its level with numpy."""
        for game, moves in (("2048-v0", ["[left]", "[up]", "[right]"]), ("Sokoban-v0", ["[up]", "[left]"])):
            await service.open(kind="textarena", game=game, num_workers=2)
            seeds = {str(i): 2**63 + i % 2 for i in range(8)}
            began = await asyncio.gather(*(service.reset(name, seed=seed) for name, seed in seeds.items()))
            seen = {
                name: [answer.SerializeToString(deterministic=True)] for name, answer in zip(seeds, began, strict=True)
            }
            for turn, move in enumerate(moves):
                answers = await asyncio.gather(*(service.step(turn, move, name) for name in seeds))
                assert not any(answer.HasField("failure") for answer in answers)
                for name, answer in zip(seeds, answers, strict=True):
                    seen[name].append(_bytes(answer))
            even, odd = [seen[str(i)] for i in range(0, 8, 2)], [seen[str(i)] for i in range(1, 8, 2)]
            assert even == 4 * even[:1] and odd == 4 * odd[:1] and even[0] != odd[0]

    @pytest.mark.parametrize(
        ("game", "message"),
        [
            ("NoSuchGame-v0", "not found in registry"),
            ("TicTacToe-v0", "players"),
            ("QuantumTicTacToe-v0", "one player"),
        ],
    )
    async def test_what_cannot_be_played_alone_is_refused_when_the_run_opens(self, service, game, message):
        with pytest.raises(InvalidInput, match=message):
            await service.open(kind="textarena", game=game)


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("reasoning_gym", reason="needs the extra `environments`", exc_type=ImportError)

    async def test_the_seed_makes_a_task(self, service):
        opened = await service.open(**SUMS)
        assert opened.environment.startswith("reasoning_gym 1/reasoning-gym-0.1")
        first, again, other = [await service.reset(name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
        assert first == again != other
        question = first.messages[0].content
        assert "<answer>" in question
        (a, sign, b) = re.search(r"(\d+) ([+-]) (\d+) =", question).groups()
        total = int(a) + int(sign + b)
        right = await service.step(0, f"Hm, <answer>1</answer>. No: <answer> {total} </answer>", "a")
        assert (right.reward, right.done) == (1.0, True)
        assert (await service.step(0, str(total), "b")).reward == 1.0
        assert (await service.step(0, "<answer></answer>", "c")).reward == 0.0

    @pytest.mark.parametrize(
        ("text", "is_reasoning", "reward"),
        [
            ("<think>Is it <answer>1</answer>?</think>\n\n<answer>{}</answer>", False, 1.0),
            ("<think>Is it <answer>1</answer>?</think>\n\n{}", False, 1.0),
            ("<think>It is <answer>{}</answer>.</think> No idea.", False, 0.0),
            ("It is <answer>{}</answer>.</think> No idea.", True, 0.0),
            ("<think>It is <answer>{}</answer>", False, 0.0),
            ("<answer>{}</answer>", True, 0.0),
            ("<think>Hm.</think><answer>{}</answer><think>Sure?</think>", False, 1.0),
        ],
    )
    async def test_an_answer_that_is_only_considered_is_not_scored(self, service, text, is_reasoning, reward):
        await service.open(**SUMS)
        (message,) = (await service.reset()).messages
        (a, sign, b) = re.search(r"(\d+) ([+-]) (\d+) =", message.content).groups()
        answer = await service.step(0, text.replace("{}", str(int(a) + int(sign + b))), is_reasoning=is_reasoning)
        assert (answer.reward == 1.0) == (reward == 1.0)

    @pytest.mark.parametrize("task", ["chain_sum", "isomorphic_strings", "word_ladder"])
    async def test_rows_of_a_file_are_scored(self, service, tmp_path, task):
        """Tests that the answers of prepared rows score 1.

        The last two tasks depend on the order of sets, which is another one in each process.
        """
        from services.coordinator.data.prepare import make_files

        report = make_files(task, {}, num_rows={"train": 3, "test": 1}, seed=5, out=tmp_path)
        rows = [row for path in report.files.values() for row in pq.read_table(path).to_pylist()]
        assert len({row["prompt"] for row in rows}) == 4
        await service.open(kind="reasoning_gym", task=task)
        for number, row in enumerate(rows):
            name = str(number)
            assert not (await service.reset(name, **row)).messages
            assert (await service.step(0, f"<answer>{row['answer']}</answer>", name)).reward == 1.0
        row = {**rows[0], "reasoning_gym": json.dumps({"task": "gcd", "settings": {}, "entry": {}})}
        assert "gcd" in (await service.reset("other", **row)).failure.message

    @pytest.mark.parametrize(
        ("task", "settings", "message"),
        [
            ("no_such_task", {}, "not registered"),
            ("chain_sum", {"min_terms": 0}, "min_terms"),
            ("arc_agi", {}, "stored"),
        ],
    )
    def test_files_that_cannot_be_made(self, tmp_path, task, settings, message):
        from services.coordinator.data.prepare import make_files

        with pytest.raises(InvalidInput, match=message):
            make_files(task, settings, num_rows={"train": 2}, seed=5, out=tmp_path)
        assert not list(tmp_path.iterdir())

    async def test_settings_that_do_not_fit_are_refused_when_the_run_opens(self, service):
        with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="environment"):
            await service.open(**{**SUMS, "kwargs": {"min_terms": 0}})
