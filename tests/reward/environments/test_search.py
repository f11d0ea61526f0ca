"""Tests the search tool: ranking, the index that is kept, and words in any script."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config.environment import SearchToolConfig
from services.reward.environments.search import Search, split_words
from services.reward.errors import EpisodeError
from tests.reward.environments.test_tools import texts


async def test_search_ranks_documents(service, tmp_path):
    pytest.importorskip("bm25s", reason="needs the extra `environments`")
    documents = [
        {"title": "Paris", "text": "Paris is the capital of France."},
        {"title": None, "text": "Rome is the capital of Italy."},
        {"title": "Twin", "text": "A zebra."},
        {"title": "Twin", "text": "A zebra."},
        {"title": "Twin", "text": "A zebra."},
    ]
    pq.write_table(pa.Table.from_pylist(documents), tmp_path / "corpus.parquet")
    tool = {"kind": "search", "corpus": str(tmp_path / "corpus.parquet"), "top_k": 2}
    opened = await service.open(kind="tools", tools=[tool], syntax="tags", result_tag="information")
    assert opened.environment.startswith("tools 1/search-bm25s-")
    await service.reset()

    async def search(turn: int, query: str) -> str:
        ((_, _, text),) = texts(await service.step(turn, f"<search>{query}</search>"))
        return text.strip().removeprefix("<information>").removesuffix("</information>")

    assert await search(0, "capital of Italy?") == (
        "Doc 1: Rome is the capital of Italy.\nDoc 2: (Title: Paris) Paris is the capital of France."
    )
    assert await search(1, "zebra") == "Doc 1: (Title: Twin) A zebra.\nDoc 2: (Title: Twin) A zebra."
    assert await search(2, "qwertz") == "No document was found."
    assert await search(3, "the of ?!") == "No document was found."
    assert await search(4, " ") == "error: the query is empty"


async def test_an_index_is_made_once(tmp_path, monkeypatch):
    bm25s = pytest.importorskip("bm25s", reason="needs the extra `environments`")
    made = []
    monkeypatch.setattr(
        bm25s.BM25, "index", lambda *args, index=bm25s.BM25.index, **more: made.append(index(*args, **more))
    )
    corpus = tmp_path / "corpus.parquet"

    async def found() -> str:
        tool = Search(SearchToolConfig(corpus=str(corpus)))
        await tool.open()
        return await tool.call({"query": "capital of Italy"}, 60.0)

    documents = [{"text": "Rome is the capital of Italy."}, {"text": "Paris is the capital of France."}]
    pq.write_table(pa.Table.from_pylist(documents), corpus)
    first = await found()
    assert first.startswith("Doc 1: Rome") and await found() == first and len(made) == 1
    (folder,) = tmp_path.glob("corpus.parquet.bm25s-*")
    assert sorted(tmp_path.iterdir()) == [corpus, folder], "nothing else is left"
    pq.write_table(pa.Table.from_pylist(documents[::-1]), corpus)
    assert (await found()) == first and len(made) == 2, "another corpus has another index"


async def test_an_index_that_holds_objects_is_refused(tmp_path):
    """To read an array of objects, numpy would have to unpickle it, which could run any code."""
    pytest.importorskip("bm25s", reason="needs the extra `environments`")
    tool = Search(SearchToolConfig(corpus=str(tmp_path / "corpus.parquet")))
    pq.write_table(pa.table({"text": ["Rome"]}), tmp_path / "corpus.parquet")
    await tool.open()
    (scores,) = tmp_path.glob("corpus.parquet.*/data*.npy")
    np.save(scores, np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(EpisodeError, match="allow_pickle=False"):
        await tool.open()


async def first_found(folder: Path, documents: list[str], query: str) -> str:
    """Returns the best document for a query; an empty text if there is none."""
    pq.write_table(pa.table({"text": documents}), folder / "corpus.parquet")
    tool = Search(SearchToolConfig(corpus=str(folder / "corpus.parquet"), top_k=1))
    await tool.open()
    return (await tool.call({"query": query}, 60.0)).removeprefix("Doc 1: ").replace("No document was found.", "")


CORPUS = [
    "东京是日本的首都。",
    "巴黎是法国的首都。",
    "富士山は日本で一番高い山です。",
    "カタカナのテレビ番組。",
    "서울은 대한민국의 수도이다.",
    "부산에서 배를 탔다.",
    "กรุงเทพเป็นเมืองหลวงของประเทศไทย",
    "ลาวมีเมืองหลวงชื่อเวียงจันทน์",
    "ភ្នំពេញជារាជធានី",
    "नई दिल्ली भारत की राजधानी है।",
    "काठमांडू नेपाल की राजधानी है।",
    "القاهرة عاصمة مصر.",
    "می‌روم به خانه",
    "Афины — столица Греции.",
    "Η Αθήνα είναι η πρωτεύουσα.",
    "Die Straße ist naß.",
    "Oranges have vitamin C.",
    "Carrots have vitamin A.",
    "He writes C++ for work.",
    "She writes C# for work.",
    "They write C for work.",
    "Room 7 is upstairs.",
    "Room 9 is upstairs.",
    "Le café est à Nîmes.",
    "The iPhone was shown.",
]


@pytest.mark.parametrize(
    ("query", "begin"),
    [
        ("日本的首都", "东京"), ("法国", "巴黎"), ("法", "巴黎"), ("富士山", "富士山"), ("山", "富士山"),
        ("ﾃﾚﾋﾞ", "カタカナ"), ("テレビ", "カタカナ"), ("서울", "서울"), ("서울의", "서울"),
        ("대한민국", "서울"), ("부산", "부산"), ("กรุงเทพ", "กรุงเทพ"), ("เวียงจันทน์", "ลาว"),
        ("ភ្នំពេញ", "ភ្នំពេញ"), ("दिल्ली", "नई"), ("नेपाल", "काठमांडू"), ("مصر", "القاهرة"),
        ("میروم", "می"), ("ГРЕЦИИ", "Афины"), ("ΑΘΉΝΑ", "Η"), ("STRASSE", "Die"),
        ("vitamin C", "Oranges"), ("Vitamin A?", "Carrots"), ("C++", "He"), ("C#", "She"),
        ("Ｃ＋＋", "He"), ("7", "Room 7"), ("９", "Room 9"), ("cafe\u0301", "Le"),
        ("ｉＰｈｏｎｅ", "The"), ("IPHONE", "The"), ("qwertz", ""), ("的?!", "东京"), ("🎉", ""),
        ("the of", ""),
    ],
)  # fmt: skip
async def test_documents_are_found_in_every_script(tmp_path, query, begin):
    pytest.importorskip("bm25s", reason="needs the extra `environments`")
    found = await first_found(tmp_path, CORPUS, query)
    assert found.startswith(begin) and bool(found) == bool(begin)


async def test_a_query_like_the_document_finds_it(tmp_path):
    pytest.importorskip("bm25s", reason="needs the extra `environments`")
    for document in CORPUS:
        assert await first_found(tmp_path, CORPUS, document) == document


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("東京都", ["東", "京", "都", "東京", "京都"]),
        ("本", ["本"]),
        ("日本のJava 8", ["日", "本", "の", "日本", "本の", "java", "8"]),
        ("ไทย", ["ไ", "ท", "ย", "ไท", "ทย"]),
        ("नमस्ते", ["नमस्ते"]),
        ("C++, c# and F#; g++", ["c", "c++", "c", "c#", "f", "f#", "g", "g++"]),
        ("1+1=2, A+ #1", ["1", "1", "2", "a", "a+", "1"]),
        ("x_1 it's", ["x_1", "s"]),
        ("", []),
        ("・。、！", []),
    ],
)
def test_words(text, expected):
    assert split_words(text) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_words_do_not_depend_on_case_or_width_and_are_those_of_the_parts(text, other):
    assert split_words(f"{text}\n{other}") == split_words(text) + split_words(other)
    assert split_words(text.upper().lower()) == split_words(text.upper().lower().casefold())
    assert all(split_words(text)) and split_words(text) == split_words(text)
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
    assert split_words(wide) == split_words(text)


def test_long_texts_are_split_in_linear_time():
    for piece in ("漢", "a", "a+", "ก็", "\u0301", "é#", " "):
        assert len(split_words(piece * 50_000)) < 200_000
