"""Texts: real, clean, sorted, without repeats; a source that is missing says how to get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarto.errors import FetchError, UnknownName, UsageError
from kvarto.models.prose import html_text, pod_text, rst_text
from kvarto.models.texts import HANDBOOK, PERL, Document, fingerprint, texts


def test_builtin_is_there_and_large_enough_to_measure_on() -> None:
    documents = texts()
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    assert sum(len(document.text) for document in documents) > 250_000
    assert all(document.text.strip() for document in documents)
    assert not any(line.startswith("****") for document in documents for line in document.text.splitlines())
    assert fingerprint(documents) == fingerprint(texts("builtin"))


def test_builtin_documents_do_not_repeat_each_other() -> None:
    documents = texts()
    assert "compound" in {document.name for document in documents}
    assert "with" not in {document.name for document in documents}  # a section of `compound`
    seen: set[str] = set()
    for document in documents:
        paragraphs = {text for text in document.text.split("\n\n") if len(text) > 200}
        assert not paragraphs & seen
        seen |= paragraphs


def test_fingerprint_depends_on_names_texts_and_order() -> None:
    a, b = Document("a", "x"), Document("b", "y")
    prints = {fingerprint(d) for d in ([a, b], [b, a], [a], [Document("ax", "")], [Document("", "ax")], [])}
    assert len(prints) == 6


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("\ufefffirst", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "c.py").write_text("not a text")
    assert texts(str(tmp_path)) == [Document("a.txt", "first"), Document("deep/b.md", "second")]
    assert texts(str(tmp_path / "c.py")) == [Document("c.py", "not a text")]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to read"):
        texts(str(tmp_path))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="byte 0xe9 at 3"):
        texts(str(tmp_path))
    with pytest.raises(UnknownName, match="did you mean handbook"):
        texts("handbok")


def test_missing_packages_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="apt-get install debian-handbook"):
        texts("handbook", handbook_root=tmp_path / "none")
    with pytest.raises(FetchError, match="apt-get install perl-doc"):
        texts("perl", perl_root=tmp_path)


PAGE = """<html><head><title>T</title><style>p {}</style></head><body><div id="banner"><a href="x">Get it<br></a></div>
<ul class="docnav"><li>Next</li></ul><div class="toc"><dl><dt>1.1</dt></dl></div>
<h2>9.10. <code>Backup</code></h2><p>One
  <em>long</em>   line &amp; more.</p><pre>a:
    b</pre><p>End.</p><script>var x;</script></body></html>"""


def test_html_keeps_what_a_reader_reads() -> None:
    assert html_text(PAGE) == "9.10. Backup\n\nOne long line & more.\n\na:\n    b\n\nEnd.\n"


POD = """#!perl code
my $x = 1;

=encoding utf8

=head1 NAME X<name>

Use C<< $a <=> $b >> or B<C<$x>> with
L<the I<operators>|perlop/"Names">, L<perlfunc/open>, E<lt>hereE<gt>.

=over 4

=item *

=item first

  code  C<raw>

=back

=begin html

<b>no</b>

=end html

=cut

more code
"""


def test_pod_keeps_what_a_reader_reads() -> None:
    expected = "NAME\n\nUse $a <=> $b or $x with the operators, perlfunc, open, <here>.\n\nfirst\n\n  code  C<raw>\n"
    assert pod_text(POD) == expected


def test_rst_loses_its_underlines_only() -> None:
    assert rst_text("Title\n*****\n\n\n\nText -- with * stars\n") == "Title\n\nText -- with * stars\n"


def test_handbook_languages_and_short_pages(tmp_path: Path) -> None:
    for language in ("en-US", "zh-CN"):
        (tmp_path / language).mkdir()
        (tmp_path / language / "index.html").write_text("<p>short</p>")
        (tmp_path / language / "sect.a.html").write_text(f"<p>{language} " + "word " * 100 + "</p>")
    assert [document.name for document in texts("handbook", handbook_root=tmp_path)] == ["sect.a"]
    assert texts("handbook:zh-CN", handbook_root=tmp_path)[0].text.startswith("zh-CN word")
    with pytest.raises(UnknownName, match="did you mean zh-CN"):
        texts("handbook:zh", handbook_root=tmp_path)


@pytest.mark.parametrize(("source", "root"), [("handbook", HANDBOOK), ("perl", PERL)])
def test_installed_manuals_are_clean_prose(source: str, root: Path) -> None:
    try:
        documents = texts(source)
    except FetchError:
        pytest.skip(f"{source} is not installed in {root}")
    assert len(documents) > 50
    assert sum(len(document.text) for document in documents) > 800_000
    assert not any("\n\n\n" in document.text or "</p>" in document.text[:200] for document in documents)
