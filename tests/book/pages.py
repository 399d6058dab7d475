"""The commands of a page: found, run in order, and held against what the page says about them.

A block ```sh has commands, ```console has `$ command` and its output. In the output `…` stands for any text in a line, a line with `…`
alone for any lines, and spaces count as one. Comments before a block say more; a reader of the rendered page does not see them:

    <!-- setup                       commands that run here first, each with exit code 0
    … -->
    <!-- file: NAME -->              the block is the content of this file
    <!-- exit 1: PREFIX -->          the commands of the block that begin with PREFIX end with this code, not with 0
    <!-- background: PREFIX -->      the command goes on beside the next ones; its output is compared at the end of the page
    <!-- ready: COMMAND -->          after the start of a background command, until this command succeeds
    <!-- not run: REASON -->         the block does not run here

Must not know: how a machine is made.
"""

import re
import subprocess
import time

SHELLS = {"sh", "console"}
# Blocks that are no commands.
OTHERS = {"", "toml", "yaml", "json", "text", "ini", "haproxy", "rust", "promql"}
LIMIT = 180
# For a background command: until it is ready, and at the end of the page, while it runs, until it has shown its output.
PATIENCE = 120


class Fault(Exception):
    """What is wrong with a page."""


class Command:
    def __init__(self, text, line, shown=None):
        self.text, self.line, self.shown = text, line, shown
        self.code, self.background, self.ready = 0, False, None
        self.hidden = False


class File:
    def __init__(self, name, text):
        self.name, self.text = name, text


class Page:
    def __init__(self):
        self.steps, self.marked = [], []

    def commands(self):
        return [step for step in self.steps if isinstance(step, Command) and not step.hidden]


def is_whole(text):
    """Whether a shell would run this, or wait for more lines: a quotation, a here-document, a loop."""
    if text.endswith("\\"):
        return False
    read = subprocess.run(["bash", "-n", "-c", text], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return read.returncode == 0 and "here-document" not in read.stderr


def commands_of(lines, first):
    found, text, start = [], "", first
    for number, line in enumerate(lines, first):
        if not text and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start if text else number
        text = f"{text}\n{line}" if text else line
        if is_whole(text):
            found.append(Command(text, start))
            text = ""
    if text:
        raise Fault(f"line {start}: not a whole command: {text}")
    return found


def console(lines, first):
    """Each `$ command` with the lines below it."""
    found, number = [], 0
    while number < len(lines):
        if not lines[number].startswith("$ "):
            raise Fault(f"line {first + number}: no `$ command`: {lines[number]}")
        text, start = lines[number][2:], number
        while not is_whole(text):
            number += 1
            if number == len(lines):
                raise Fault(f"line {first + start}: not a whole command: {text}")
            text += "\n" + lines[number]
        shown, number = [], number + 1
        while number < len(lines) and not lines[number].startswith("$ "):
            shown.append(lines[number])
            number += 1
        found.append(Command(text, first + start, "\n".join(shown).rstrip("\n")))
    return found


def annotate(commands, notes):
    """Applies the comments before a block to its commands; each must fit one."""
    for key, value in notes:
        if key.startswith("exit "):
            fitting = [command for command in commands if command.text.startswith(value)]
            for command in fitting:
                command.code = int(key.removeprefix("exit "))
        elif key == "background":
            fitting = [command for command in commands if command.text.startswith(value)]
            for command in fitting:
                command.background = True
        elif key == "ready":
            fitting = [command for command in commands if command.background]
            for command in fitting:
                command.ready = value
        else:
            raise Fault(f"no such comment: {key}")
        if not fitting:
            raise Fault(f"no command for the comment `{key}: {value}`")


def read(document):
    page, notes = Page(), []
    lines = document.split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        bare = line.strip()
        number += 1
        if bare == "<!-- setup":
            start = number
            while lines[number].strip() != "-->":
                number += 1
            hidden = commands_of([text.strip() for text in lines[start:number]], start + 1)
            number += 1
            for command in hidden:
                command.hidden = True
            page.steps += hidden
        elif note := re.fullmatch(r"<!-- ([a-z]+(?: [a-z0-9]+)?): (.*) -->", bare):
            notes.append(note.groups())
        elif bare.startswith("```"):
            indent, language, start = len(line) - len(line.lstrip()), bare[3:].split(",")[0].strip(), number
            while number < len(lines) and lines[number].strip() != "```":
                number += 1
            if number == len(lines):
                raise Fault(f"line {start}: the block has no end")
            block = [text[indent:] for text in lines[start:number]]
            number += 1
            add_block(page, language, block, start + 1, notes)
            notes = []
        elif bare:
            if notes:
                raise Fault(f"line {number}: a comment without its block: {notes[0]}")
    return page


def add_block(page, language, block, first, notes):
    keys = dict(notes)
    if "file" in keys:
        page.steps.append(File(keys["file"], "\n".join(block) + "\n"))
        return
    if language not in SHELLS:
        if language not in OTHERS or any(line.startswith("$ ") for line in block):
            raise Fault(f"line {first}: commands in a block ```{language}: write ```sh or ```console")
        return
    found = console(block, first) if language == "console" else commands_of(block, first)
    if not found:
        raise Fault(f"line {first}: a block without a command")
    if helped := [command for command in found if "--help" in command.text]:
        raise Fault(f"line {helped[0].line}: --help shows nothing of a command")
    if "not run" in keys:
        page.marked += [keys["not run"]] * len(found)
        return
    annotate(found, notes)
    page.steps += found


def has(output, shown):
    """Whether the output is the shown one."""
    def words(text):
        return [re.sub(r"\s+", " ", line).strip() for line in text.strip("\n").split("\n")]

    pattern = []
    for line in words(shown):
        if line == "…":
            pattern.append(r"(?:[^\n]*\n)*")
        else:
            pattern.append(".*".join(re.escape(part) for part in line.split("…")) + r"\n")
    return re.fullmatch("".join(pattern), "".join(line + "\n" for line in words(output))) is not None


def run(page, machine):
    """Runs the steps, up to the first fault."""
    behind = []
    for step in page.steps:
        if isinstance(step, File):
            machine.write(step.name, step.text)
            continue
        title = f"line {step.line}: `{step.text}`"
        if step.background:
            output = machine.begin(step.text)
            behind.append((title, step, output))
            if step.ready:
                until = time.monotonic() + PATIENCE
                while machine.run(step.ready, LIMIT)[0] != 0:
                    if time.monotonic() > until:
                        return [f"{title}: not ready by `{step.ready}`: {output()}"]
                    time.sleep(0.1)
            continue
        code, output = machine.run(step.text, LIMIT)
        if code != step.code:
            return [f"{title}: exit code {code}, not {step.code}:\n{output}"]
        if step.shown is not None and not has(output, step.shown):
            return [f"{title}: other output than shown:\n{output}"]
    for title, step, output in behind:
        until = time.monotonic() + PATIENCE
        while step.shown:
            goes_on = machine.run("jobs -r | grep .", LIMIT)[0] == 0
            if has(output(), step.shown):
                break
            if not goes_on or time.monotonic() > until:
                return [f"{title}: other output than shown:\n{output()}"]
            time.sleep(0.1)
    return []
