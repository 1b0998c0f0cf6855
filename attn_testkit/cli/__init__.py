"""The command line. Data goes to stdout, everything else to stderr; exit codes are pytest's."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence

import click

from ..registry import UsageError
from ..running.processes.judge_process import JudgeError
from .compile import compile_
from .demo import demo
from .doctor import doctor
from .elsewhere import ELSEWHERE, absent, registered, registered_names
from .explain import explain
from .fuzz import fuzz
from .group import Commands
from .interpreter import continue_in
from .known import known
from .list_ import list_
from .minimize import minimize
from .new import new
from .repro import repro
from .results import results
from .run import run
from .submissions import matrix, submit, verify
from .version import version_text

__all__ = ["all_commands", "main"]


class _Commands(Commands):
    """Hands a command to another interpreter, and finds the commands of other distributions."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        return found if found and cmd_name not in ELSEWHERE else registered(cmd_name) or found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if ctx.params["python"]:
            continue_in(ctx.params["python"], args)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys([*self.commands, *registered_names()]))


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(version_text())
        context.exit()


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 conformant, 1 not, 2 interrupted, 3 kit error, 4 wrong usage, 5 nothing ran, 7 cut short.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
    help="Show the version, and the devices that the emulation is compared with.",
)  # fmt: skip
@click.option(
    "--python", metavar="PATH",
    help="Run the command with another Python, for example one from an SGLang or vLLM environment.",
)  # fmt: skip
def commands(python: str | None) -> None:
    """Check that an LLM attention backend returns the right numbers, in eager mode and under CUDA graphs."""


for _command in (
    demo,
    run,
    repro,
    minimize,
    fuzz,
    compile_,
    absent("record"),
    new,
    doctor,
    list_,
    explain,
    results,
    known,
    submit,
    verify,
    matrix,
    absent("audit"),
):
    commands.add_command(_command)


def all_commands() -> dict[str, click.Command]:
    """Name -> command, as ``results show``, those of other distributions included, in the order of ``--help``."""
    context = click.Context(commands)
    found: dict[str, click.Command] = {}
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        if isinstance(command, click.Group):
            found |= {f"{name} {within}": each for within, each in command.commands.items()}
        elif command:
            found[name] = command
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Set before torch reads it: waiting OpenMP threads spin, and the tensors are tiny.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        code = commands.main(args=argv and list(argv), prog_name="attn-testkit", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except UsageError as error:
        return _complain(str(error))
    except JudgeError as error:
        click.echo(f"attn-testkit: the kit itself failed: {error}", err=True)
        return 3
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 4
    except click.UsageError as error:
        return _complain(f"{error.format_message()}{_usage(error)}")
    except click.ClickException as error:
        return _complain(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        click.echo("attn-testkit: interrupted", err=True)
        return 2
    except BrokenPipeError:
        # The reader of our output has closed it (`| head`); Python would complain once more while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:
        traceback.print_exc()
        click.echo("attn-testkit: the kit itself failed. This is a bug of the kit, not of the backend.", err=True)
        return 3


def _usage(error: click.UsageError) -> str:
    """The usage of a command, or the option to write instead, if the message contains neither."""
    named = isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter)
    if error.ctx is None or named:
        return ""
    extra = re.match(r"Got unexpected extra argument \((\S+)\)", error.format_message())
    if extra and any(option.name == "backends" for option in error.ctx.command.params):
        return f"; a backend is named with --backend {extra[1]}"
    if isinstance(error, click.NoSuchOption):
        return f" `{error.ctx.command_path} --help` lists the options."
    return f"{'' if isinstance(error, click.MissingParameter) else '.'} {error.ctx.get_usage()}"


def _complain(message: str) -> int:
    click.echo(f"attn-testkit: {' '.join(message.split())}", err=True)
    return 4
