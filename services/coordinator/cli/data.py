"""Implements `lockstep data`, which creates prompt files. Modules that create them are imported only when needed."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from services.common.counted import counted
from services.coordinator.data.prepare.formats import FORMATS, ConversionOptions, Format, Split

if TYPE_CHECKING:
    from services.coordinator.data.prepare.convert import ConversionReport

_DEFAULTS = ConversionOptions()

_BadRows = Annotated[Literal["fail", "drop"], typer.Option(help="Fail on rows that cannot be converted, or drop them.")]
_Out = Annotated[Path, typer.Option(help="Directory to write train.parquet and test.parquet to.")]


def app() -> typer.Typer:
    """Returns the subcommands of `lockstep data`. They raise LockstepError."""
    data = typer.Typer(help="Create prompt files from public datasets.", no_args_is_help=True)
    for format in FORMATS.values():
        data.command(format.name, help=f"Convert {format.hub_id}.")(_converter(format))
    data.command("arithmetic")(_arithmetic)
    data.command("reasoning-gym")(_reasoning_gym)
    data.command("search-r1")(_search_r1)
    return data


def _converter(format: Format) -> Callable[..., None]:
    def command(
        out: _Out,
        source: Annotated[
            str, typer.Option(help="File, directory, or dataset id on the Hugging Face Hub.")
        ] = format.hub_id,
        revision: Annotated[
            str | None, typer.Option(help="Commit, tag or branch of the dataset on the Hub.")
        ] = _DEFAULTS.revision,
        bad_rows: _BadRows = _DEFAULTS.bad_rows,
        test_size: Annotated[
            int, typer.Option(min=0, help="Number of problems to hold out if the source has no test split; 0 for none.")
        ] = _DEFAULTS.test_size,
        instruction: Annotated[str, typer.Option(help="Text to append to each problem.")] = format.instruction,
    ) -> None:
        from services.coordinator.data.prepare.convert import convert

        options = ConversionOptions(bad_rows, test_size, instruction, revision)
        _show(convert(format, source, out, options))

    return command


def _arithmetic(
    out: _Out = Path("data/arithmetic"),  # where the configs of deploy/runs look for it
    num_train: Annotated[int, typer.Option(min=1, help="Rows of train.parquet.")] = 10_000,
    num_test: Annotated[int, typer.Option(min=1, help="Rows of test.parquet.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")] = 0,
) -> None:
    """Generate the quickstart's task: additions and subtractions of numbers up to 99."""
    from services.coordinator.data.prepare.tasks import make_arithmetic

    _show(make_arithmetic(num_rows={"train": num_train, "test": num_test}, seed=seed, out=out))


def _reasoning_gym(
    out: _Out,
    task: Annotated[str, typer.Option(help="Name of the task, such as chain_sum.")],
    num_rows: Annotated[int, typer.Option(min=1, help="Rows of train.parquet.")] = 10_000,
    num_test: Annotated[int, typer.Option(min=0, help="Rows of test.parquet; 0 for none.")] = 256,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="The same seed gives the same files.")] = 0,
    settings: Annotated[str, typer.Option(help="Settings of the task, as a JSON object.")] = "{}",
) -> None:
    """Generate tasks of reasoning-gym for `environment: {kind: reasoning_gym}` (extra: environments)."""
    from services.coordinator.data.prepare.tasks import make_files, parse_settings

    sizes: dict[Split, int] = {"train": num_rows, "test": num_test} if num_test else {"train": num_rows}
    _show(make_files(task, parse_settings(settings), num_rows=sizes, seed=seed, out=out))


def _search_r1(
    questions: Annotated[Path, typer.Option(help="File of questions: question and a list or text of answers.")],
    corpus: Annotated[Path, typer.Option(help="File of documents: text and optionally title, or contents.")],
    out: Annotated[Path, typer.Option(help="Directory to write train.parquet, corpus.parquet and the test to.")],
    test_questions: Annotated[Path | None, typer.Option(help="File of questions for test.parquet.")] = None,
    bad_rows: _BadRows = _DEFAULTS.bad_rows,
) -> None:
    """Convert Search-R1's questions and documents, in any form that a run reads, for episodes with a search."""
    from services.coordinator.data.prepare.convert import make_search_files

    files: dict[Split, Path] = {"train": questions, **({"test": test_questions} if test_questions else {})}
    _show(make_search_files(files, corpus, out, bad_rows))


def _show(report: "ConversionReport") -> None:
    from services.coordinator.data.reading.record import NUM_NAMED
    from services.coordinator.observe.console import literal_console

    console = literal_console(soft_wrap=True, highlight=False)
    console.print(f"{report.dataset} from {report.source}")
    for name, path in report.files.items():
        held_out = ", held out of train" if name == "test" and report.num_held_out else ""
        console.print(f"  {name:<6} {report.num_rows[name]:>6} rows  {path}{held_out}")
    if report.dropped:
        console.print(f"  dropped {counted(len(report.dropped), 'bad row')}:")
    for place in report.dropped[:NUM_NAMED]:
        console.print(f"    {place}")
