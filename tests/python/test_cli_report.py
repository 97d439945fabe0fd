"""`fattn regress` and `fattn report` as a person runs them: exit codes, files, what is refused, and the page in a browser where one is there."""
import html.parser
import json
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, schema_of

RESULTS = ROOT / "docs" / "results"
TINY = ["bench", "--batch", 1, "--seqlen", 64, "--nheads", 1, "--headdim", 16, "--no-grad", "--min-time", 0, "--repeats", 10, "--warmup", 1]
PAGE_RECORDS = ["h200-headline", "h200-algorithms-b4-s512", "h200-algorithms-b4-s1024", "h200-algorithms-b4-s2048", "h200-algorithms-b4-s4096", "h200-suite",
                "cpu-suite-2-cores-zen4", "cpu-prices-2-cores-zen5", "accuracy", "values"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def measured(fattn, folder):
    """A record of this machine, measured because a baseline has these flags, and kept although the baseline is another machine's."""
    path, earlier = folder / "measured.json", json.loads((RESULTS / "h200-headline.json").read_text())
    earlier.update(command="bench", flags=list(map(str, TINY[1:])))
    (folder / "earlier.json").write_text(json.dumps(earlier))
    assert "--across-machines" in fattn.refuses("regress", "--baseline", folder / "earlier.json", "--save", path)
    return path


def changed(path, name, change):
    record = json.loads(path.read_text())
    change(record)
    (path.parent / name).write_text(json.dumps(record))
    return path.parent / name


def scale(factor):
    def change(record):
        for row in record["rows"]:
            for key in ("time_min_s", "time_median_s", "time_mean_s", "time_max_s", "time_ci_low_s", "time_ci_high_s"):
                row[key] *= factor
            row["time_turn_medians_s"] = [factor * t for t in row["time_turn_medians_s"]]
            row["time_turn_samples_s"] = [[factor * t for t in turn] for turn in row["time_turn_samples_s"]]
        record["environment"]["date"] = "2026-01-01T00:00:00Z"  # another run
    return change


def test_records_keep_samples_of_turns(measured):
    for row in json.loads(measured.read_text())["rows"]:
        assert len(row["time_turn_samples_s"]) == 5 and sum(map(len, row["time_turn_samples_s"])) == row["samples"] == 10


def test_verdicts_and_exit_codes(fattn, measured):
    quiet = changed(measured, "quiet.json", lambda r: [row.update(time_turn_samples_s=[[row["time_median_s"]] * 2] * 5) for row in r["rows"]])
    slower = changed(quiet, "slower.json", scale(1.1))
    assert "1 same" in fattn("regress", "--baseline", quiet, "--current", quiet).stdout
    done = fattn("regress", "--baseline", quiet, "--current", slower, status=1)
    assert "1 worse" in done.stdout and "+10.0 %" in done.stdout
    assert "1 better" in fattn("regress", "--baseline", slower, "--current", quiet).stdout
    assert "1 same" in fattn("regress", "--baseline", quiet, "--current", slower, "--margin", "12").stdout
    verdict = fattn.json("regress", "--baseline", quiet, "--current", slower, status=1)
    assert verdict["verdict"] == "worse" and verdict["rows"][0]["ratio"] == pytest.approx(1.1) and verdict["counts"]["worse"] == 1
    failed = changed(quiet, "failed.json", lambda r: [row.update(status="check_failed", reason="o differs") for row in r["rows"]])
    assert "was ok, now check_failed: o differs" in " ".join(fattn("regress", "--baseline", quiet, "--current", failed, status=1).stdout.split())


def test_what_is_measured_now(fattn, measured, folder):
    schema_of(json.loads(measured.read_text())).validate(json.loads(measured.read_text()))
    saved = folder / "now.json"
    other = fattn.refuses("regress", "--baseline", measured, "--across-clocks", "--save", saved, "--", *TINY[1:], "--causal")
    assert "--causal" in other and "--across-flags" in other
    assert "no row" in fattn.refuses("regress", "--baseline", measured, "--across-clocks", "--across-flags", "--current", saved)
    assert "nothing was measured" in fattn.refuses("regress", "--baseline", measured, "--", "--seqlen", "none")


def test_what_is_not_compared(fattn, measured):
    other = changed(measured, "other.json", lambda r: r["environment"]["cpu"].update(model="<b>another</b>\x1b[31m"))
    said = fattn.refuses("regress", "--baseline", measured, "--current", other)
    assert "--across-machines" in said and "\x1b" not in said
    fattn("regress", "--baseline", measured, "--current", other, "--across-machines")
    for flags in (["--baseline", measured, "--current", measured, "--margin", "-1"], ["--baseline", measured, "--current", measured, "--match", "v2"],
                  ["--baseline", measured, "--current", measured, "--save", "x.json"], ["--current", measured], ["--baseline", RESULTS / "values.json"]):
        fattn.refuses("regress", *flags)


@pytest.mark.parametrize("language", ["en", "zh-TW"])
def test_whole_report(fattn, folder, language):
    out = folder / language / "below"
    made = fattn.json("report", "--lang", language, "--from", *(RESULTS / f"{name}.json" for name in PAGE_RECORDS), "--out", out)
    assert {entry["path"] for entry in made["files"]} == {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    page = (out / "index.html").read_text()
    assert len(page) < 2_000_000 and "<script" not in page and not re.search(r"(src|href)=\"[^#]", page) and f'<html lang="{language}">' in page
    assert ("序列長度" in page) == ("記憶體" in page) == (language == "zh-TW")

    class Whole(html.parser.HTMLParser):
        open_elements = []

        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "link", "br", "img"):
                self.open_elements.append(tag)

        def handle_endtag(self, tag):
            assert self.open_elements.pop() == tag

    whole = Whole()
    whole.feed(page)
    assert not whole.open_elements
    numbers = set(re.findall(r"\d+\.\d\d", re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.S)))
    markdown = (out / "report.md").read_text()
    assert len(numbers) > 100 and numbers <= set(re.findall(r"\d+\.\d\d", markdown)), "Markdown says the same"
    for figure in re.findall(r"\((figures/[^)]+)\)", markdown):
        assert (out / figure).read_text().startswith("<svg")


def test_nothing_is_written_where_a_record_is_none(fattn, folder, measured):
    out = folder / "kept"
    fattn("report", "--from", measured, "--out", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    whole = measured.read_text()
    for name, text, said in (("cut.json", whole[: len(whole) // 2], "cut off"), ("empty.json", "", "empty"), ("other.json", '{"fattn_record": 9}', "version 9"),
                             ("none.json", '{"what": 1}', "no record"), ("rows.json", json.dumps({**json.loads(whole), "rows": []}), "no rows"),
                             ("type.json", whole.replace('"time_median_s": ', '"time_median_s": "x", "y": '), "time_median_s")):
        (folder / name).write_text(text)
        assert said in fattn.refuses("report", "--from", measured, folder / name, "--out", out)
        assert said in fattn.refuses("regress", "--baseline", folder / name, "--current", measured)
    assert not (folder / "new").exists()
    fattn.refuses("report", "--from", folder / "cut.json", "--out", folder / "new")
    assert not (folder / "new").exists()
    assert "cannot be made" in fattn.refuses("report", "--from", measured, "--out", measured)
    fattn.refuses("report", "--from", measured, "--out", out, "--lang", "fr")
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_nothing_from_a_record_is_markup(fattn, folder):
    record = json.loads((RESULTS / "h200-headline.json").read_text())
    tag = "<script>document.title='caught'</script>"
    record["environment"]["gpus"][0]["name"] = tag
    record["flags"] += ["--providers", tag]
    for row in record["rows"]:
        if row["provider"] == "torch-sdpa":
            row["provider"] = tag
    (folder / "markup.json").write_text(json.dumps(record))
    out = folder / "markup"
    fattn("report", "--from", folder / "markup.json", "--out", out)
    for path in out.rglob("*"):
        if path.suffix in (".html", ".svg"):
            assert "<script" not in path.read_text() and "&lt;script" in path.read_text()
    without_code = re.sub(r"^````*sh\n.*?^````*$", "", (out / "report.md").read_text(), flags=re.S | re.M)
    assert "\\<script" in without_code and not re.search(r"(?<!\\)<script", without_code)


def browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(not browser(), reason="no Chromium or Chrome is installed")
def test_in_a_browser(fattn, folder):
    """It is shown without an error and without a request, and fits a phone: nothing but tables and code that scroll by themselves is wider than 390 pixels."""
    out = folder / "browser"
    fattn("report", "--from", RESULTS / "h200-headline.json", RESULTS / "h200-suite.json", "--out", out)
    page = (out / "index.html").read_text()
    measure = "<script>addEventListener('load',()=>parent.postMessage(document.documentElement.scrollWidth+' '+document.querySelectorAll('svg').length+' '+document.querySelectorAll('h2').length+' '+performance.getEntriesByType('resource').length,'*'))</script>"
    (out / "inside.html").write_text(page.replace("</body>", measure + "</body>"))
    (out / "phone.html").write_text("<title>none</title><script>addEventListener('message',e=>document.title=e.data)</script>"
                                    "<iframe src=inside.html style='width:390px;height:800px;border:0'></iframe>")
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*command, "--enable-logging=stderr", "--dump-dom", f"file://{out}/phone.html"], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(\d+) (\d+) (\d+) (\d+)</title>", done.stdout)
    assert title, done.stdout[:500] + done.stderr[-2000:]
    width, figures, sections, requests = map(int, title.groups())
    assert width <= 390 and figures == page.count("<svg ") > 2 and sections == page.count("<h2 ") and requests == 0
    assert "CONSOLE" not in done.stderr, done.stderr


def test_the_report_of_the_results_is_up_to_date(fattn, tmp_path):
    """And tools/make_report.py --check says so when it is not."""
    tool = tmp_path / "tools" / "make_report.py"
    for folder in ("tools", "docs/results"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "make_report.py", tool)
    for record in RESULTS.glob("*.json"):
        (tmp_path / "docs/results" / record.name).symlink_to(record)
    shutil.copytree(ROOT / "docs" / "report", tmp_path / "docs" / "report")

    def check() -> subprocess.CompletedProcess:
        return subprocess.run(["python3", tool, "--check"], capture_output=True, text=True, env={"FATTN_CLI": fattn.path, "PATH": "/usr/bin:/bin"})

    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    figure = next((tmp_path / "docs/report/figures").glob("*.svg"))
    figure.write_text(figure.read_text().replace("fill", "Fill", 1))
    (tmp_path / "docs/report/old.svg").write_text("<svg/>")
    done = check()
    assert done.returncode == 1 and f"{figure.name} is stale" in done.stdout and "old.svg is stale" in done.stdout
