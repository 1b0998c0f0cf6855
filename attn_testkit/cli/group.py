"""A group of commands that suggests the right word for a misspelt one."""

from __future__ import annotations

import click

from ..registry import UsageError, unknown


class Commands(click.Group):
    """Commands in the order in which they were added, which is the order in which a user needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command. Raises ``UsageError`` with the command that was probably meant, also for one in a group."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            groups = (group for group in self.commands.values() if isinstance(group, click.Group))
            within = next((group.name for group in groups if name in group.commands), "")
            near = f"unknown command {name!r}; did you mean '{within} {name}'?" if within else ""
            raise UsageError(near or unknown("command", name, self.list_commands(ctx)))
        return super().resolve_command(ctx, args)
