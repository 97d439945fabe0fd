"""Programs in forked processes end and speak as they do in processes of their own."""

import os
import subprocess

import pytest

pytest.importorskip("torch")

import forked


def test_it_says_how_it_ended(tmp_path):
    (tmp_path / "beside.py").write_text("NUMBER = 7")
    (tmp_path / "program.py").write_text("import sys, beside\nassert __name__ == '__main__'\nprint(sys.argv[1:], beside.NUMBER)\nsys.exit(beside.NUMBER)")
    done = forked.python(tmp_path / "program.py", "a", "b")
    assert (done.returncode, done.stdout, done.stderr) == (7, "['a', 'b'] 7\n", "")
    done = forked.python("-c", "import sys, torch\nprint('torch' in sys.modules, sys.argv)\nraise ValueError('no ' + __name__)", "x")
    assert done.returncode == 1 and done.stdout == "True ['-c', 'x']\n" and "ValueError: no __main__" in done.stderr
    assert forked.python("-c", "import os\nos.abort()").returncode == -6
    assert forked.python("-m", "fattn.compat").returncode == 2
    assert forked.python("-c", "import os\nprint(os.environ['GIVEN'], os.getcwd())", GIVEN="this").stdout == f"this {os.getcwd()}\n"
    with pytest.raises(subprocess.TimeoutExpired):
        forked.python("-c", "import time\ntime.sleep(60)", timeout=0.5)


def test_one_does_not_see_the_other():
    assert forked.python("-c", "import torch\ntorch.of_another = 1\ntorch.set_num_threads(1)").returncode == 0
    assert forked.python("-c", "import torch\nassert not hasattr(torch, 'of_another')").returncode == 0
