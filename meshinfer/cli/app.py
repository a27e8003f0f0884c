"""The table of commands, and what becomes of an error that one of them raises."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from meshinfer.base.errors import MeshinferError
from meshinfer.cli import chat, leave, membership, models, plan, simulate, status, unload, up, version
from meshinfer.cli.options import home_named
from meshinfer.cli.terminal import err, show_error


class _Commands(TyperGroup):
    """Commands whose errors are shown as a person can act on them, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MeshinferError as error:
            show_error(error, home_named(ctx))
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            err.print()
            raise typer.Exit(130) from None  # 128 + SIGINT, as shells have it


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.callback()(version.with_version_option)
app.command(rich_help_panel="This node")(up.up)
app.command(rich_help_panel="This node")(leave.leave)
app.command(rich_help_panel="This node")(membership.join)
app.command(rich_help_panel="This node")(membership.invite)
app.add_typer(models.app, name="models", rich_help_panel="This node")
app.command(rich_help_panel="The mesh")(status.status)
app.command(rich_help_panel="The mesh")(plan.plan)
app.command(rich_help_panel="The mesh")(chat.chat)
app.command(rich_help_panel="The mesh")(unload.unload)
app.command(rich_help_panel="Other")(simulate.simulate)
app.command(rich_help_panel="Other")(version.version)
