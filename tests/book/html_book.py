"""The book: its list of pages; and as HTML, by `mdbook build docs`, with every link followed.

Must not know: commands. Links that leave the book lead to files of the repository, because the book lies beside `docs`.
"""

import html.parser
import os
import tempfile
from pathlib import Path
from urllib.parse import unquote

import tools
from tools import ROOT, Failed, expect, run


def mdbook():
    return tools.cargo_tools("mdbook")[0]


class Links(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.targets, self.anchors = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id") or attributes.get("name") or "")
        if tag == "a" and attributes.get("href"):
            self.targets.append(attributes["href"])
        if tag == "img" and attributes.get("src"):
            self.targets.append(attributes["src"])


def build():
    program = mdbook()
    with tempfile.TemporaryDirectory(prefix="keyward-book-") as folder:
        for entry in ROOT.iterdir():
            if entry.name not in (".git", "book", "target"):
                (Path(folder) / entry.name).symlink_to(entry)
        book = Path(folder) / "book"
        run(program, "build", ROOT / "docs", "--dest-dir", book)
        files = {path: Links(path.read_text()) for path in book.rglob("*.html") if path.name not in ("print.html", "404.html", "toc.html")}
        expect(len(files) > 40, f"the book has {len(files)} pages")
        missing, followed = [], 0
        for path, links in files.items():
            for target in links.targets:
                if target.startswith(("https://", "mailto:")):
                    continue
                name, _, anchor = unquote(target).partition("#")
                place = (path.parent / name).absolute() if name else path
                place = Path(os.path.normpath(place))
                followed += 1
                known = files[place].anchors if place in files else None
                if not place.exists() or (anchor and known is not None and anchor not in known):
                    missing.append(f"{path.relative_to(book)}: {target}")
        if missing:
            raise Failed("links that lead nowhere:\n" + "\n".join(missing))
        return f"mdbook build: {len(files)} pages, {followed} links followed"


def listed():
    """Every page is in the book's list."""
    summary, pages = (ROOT / "docs/SUMMARY.md").read_text(), sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    apart = [name for name in pages if name != "SUMMARY.md" and f"({name})" not in summary]
    expect(not apart, f"pages that SUMMARY.md does not list: {apart}")
    return f"{len(pages)} pages, each in the book's list"
