"""A plan as one HTML file, or its curves as one SVG file: no script, no font, no address."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvarto import __version__
from kvarto.plan import charts, show
from kvarto.plan.answer import Answer
from kvarto.plan.prefixes import PrefixAnswer


def html(made: Answer, prefixes: PrefixAnswer | None) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("kvarto.plan", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip
    environment.globals.update(size=show.size, tokens=show.tokens, gain=show.gain)
    return environment.get_template("report.html.j2").render(
        made=made, prefixes=prefixes, version=__version__, style=Markup(_style()), headline=show.headline(made), prompt=show.prompt(made),
        main=[each.name for each in charts.shown_formats(made)], curves=_curves(made, prefixes), waterfalls=_waterfalls(made),
    )  # fmt: skip


def svg(made: Answer, prefixes: PrefixAnswer | None) -> str:
    """The curves, below each other."""
    return charts.stacked(
        [*_curves(made, prefixes), *_waterfalls(made)], _style(), f"kvarto plan: {made.model.short_name}"
    )


def _curves(made: Answer, prefixes: PrefixAnswer | None) -> list[Markup]:
    drawn = [
        charts.share_curves(made),
        charts.gain_curves(made),
        charts.hit_curve(prefixes) if prefixes else Markup(""),
    ]
    return [each for each in drawn if each]


def _waterfalls(made: Answer) -> list[Markup]:
    drawn = [charts.waterfall(made, each) for each in charts.shown_formats(made)[:4]]
    return [each for each in drawn if each]


def _style() -> str:
    return files("kvarto.plan").joinpath("curves.css").read_text()
