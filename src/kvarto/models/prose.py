"""Plain text out of the markup that the documents come in: HTML, POD and the already rendered RST of pydoc.

Only what a reader would read is kept, in paragraphs with an empty line between. Code samples keep their line breaks.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

_HEADINGS = frozenset(("h1", "h2", "h3", "h4", "h5", "h6"))
_LISTS = frozenset(("ul", "ol", "li", "dl", "dt", "dd", "table", "tr"))
_BLOCKS = frozenset(("p", "div", "pre", "br", "hr")) | _HEADINGS | _LISTS
_VOID = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
)
_HIDDEN_TAGS = frozenset(("head", "script", "style"))
# What Publican, the handbook's tool, wraps around a page: the banner, the product line, navigation, contents.
_HIDDEN_IDS = frozenset(("banner", "title"))
_HIDDEN_CLASSES = frozenset(("docnav", "toc"))

_UNDERLINE = re.compile(r"([*=\-~^\"])\1{2,}")
_POD_ESCAPES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "amp": "&", "quot": '"'}
_POD_CODE = re.compile(r"([A-Z])(?:<<\s+((?:(?![A-Z]<).)*?)\s+>>|<((?:(?![A-Z]<)[^<>])*)>)", re.DOTALL)


def rst_text(text: str) -> str:
    """A pydoc topic without the underlines of its titles."""
    return _tidy("\n".join(line for line in text.splitlines() if not _UNDERLINE.fullmatch(line.strip())))


def html_text(html: str) -> str:
    """The readable text of an HTML page, without navigation and contents."""
    reader = _HTMLText()
    reader.feed(html)
    reader.close()
    return _tidy("".join(reader.parts))


def pod_text(pod: str) -> str:
    """The readable text of a Perl POD page."""
    paragraphs, skipping = [], True
    ended = ""
    for paragraph in re.split(r"\n[ \t]*\n", pod.replace("\r\n", "\n")):
        block = paragraph.strip("\n")
        command, _, rest = block.partition(" ") if block.startswith("=") else ("", "", block)
        if command:
            skipping, ended = _pod_state(command.strip(), rest, ended)
        if skipping or ended or command.startswith(("=over", "=back", "=encoding", "=for", "=pod", "=end")):
            continue
        if block[:1] in (" ", "\t"):
            paragraphs.append(block)
        else:
            paragraphs.append(_pod_inline(" ".join(rest.split())))
    return _tidy("\n\n".join(paragraph for paragraph in paragraphs if paragraph.strip("* ")))


def _pod_state(command: str, rest: str, ended: str) -> tuple[bool, str]:
    """(Perl code follows, the =begin block that we are in): POD ends at =cut; =begin is for other formatters."""
    if command == "=begin":
        ended = rest.split()[0] if rest else "?"
    elif command == "=end":
        ended = ""
    return command == "=cut", ended


def _pod_inline(text: str) -> str:
    """Resolve formatting codes from the inside out: L<the text|perlop> is `the text`, C<< $x >> is `$x`."""
    previous = None
    while previous != text:
        previous = text
        text = _POD_CODE.sub(_pod_code, text)
    # Escaped brackets wait outside Unicode's assigned characters until all codes are resolved.
    return text.replace("\ue000", "<").replace("\ue001", ">").replace("\ue002", "|")


def _pod_code(match: re.Match[str]) -> str:
    code, content = match[1], match[2] if match[2] is not None else match[3]
    if code in "XZ":
        return ""
    if code == "E":
        content = _POD_ESCAPES.get(content, content if len(content) == 1 else "")
    elif code == "L":
        content = (
            content.partition("|")[0].lstrip("/").replace("/", ", ").replace('"', "")
            if "://" not in content
            else content
        )
    return content.replace("<", "\ue000").replace(">", "\ue001").replace("|", "\ue002")


class _HTMLText(HTMLParser):
    """Collects text; hidden elements are counted by depth, so that whatever nests in them is hidden too."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden_depth = 0
        self.verbatim_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self._break()
        if tag in _VOID:
            return
        if self.hidden_depth or self._hides(tag, dict(attrs)):
            self.hidden_depth += 1
        elif tag == "pre":
            self.verbatim_depth += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        if self.hidden_depth:
            self.hidden_depth -= 1
        elif tag == "pre":
            self.verbatim_depth = max(0, self.verbatim_depth - 1)
        if tag in _BLOCKS:
            self._break()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self._break()

    def handle_data(self, data: str) -> None:
        if self.hidden_depth:
            return
        if self.verbatim_depth:
            self.parts.append(data)
        elif text := re.sub(r"\s+", " ", data):
            at_start = not self.parts or self.parts[-1].endswith(("\n", " "))
            self.parts.append(text.lstrip() if at_start else text)

    def _break(self) -> None:
        if self.parts and not self.hidden_depth:
            self.parts.append("\n\n")

    @staticmethod
    def _hides(tag: str, attributes: dict[str, str | None]) -> bool:
        classes = (attributes.get("class") or "").split()
        return tag in _HIDDEN_TAGS or attributes.get("id") in _HIDDEN_IDS or not _HIDDEN_CLASSES.isdisjoint(classes)


def _tidy(text: str) -> str:
    """No trailing blanks, at most one empty line in a row, one line end at the end."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n" if lines.strip() else ""
