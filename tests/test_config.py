"""The configuration file: what is read, and each mistake with its file, line and key."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from backend.config import Config, ConfigError, Host, as_dict, default_path, load, parse
from backend.tomllines import line_of

DOC = Path(__file__).parent.parent / "docs" / "configuration.md"


def wrong(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(text, "ez.toml")
    return str(error.value)


def test_without_a_file_this_machine_is_the_only_host(home: Path) -> None:
    assert str(default_path()).startswith(str(home))
    assert load() == Config(hosts={"local": Host()})
    assert load().hosts["local"].local


def test_a_file_is_read_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(
        b"\xef\xbb\xbf[hosts.b]\r\naddress = 'gpu'\r\nport = 2222\r\n[hosts.a]\r\n"
        b"[stages.train]\r\ncommand = ['x']\r\n[stages.extract]\r\nkind='extract'\r\ncorpus='c'\r\nout='/o'\r\n"
    )
    config = load(path)
    assert list(config.hosts) == ["b", "a"]
    assert list(config.stages) == ["train", "extract"]
    assert (config.hosts["b"].port, config.hosts["b"].local, config.hosts["a"].local) == (2222, False, True)
    assert as_dict(config)["stages"]["train"]["grace_s"] == 15.0


def test_a_file_of_thresholds_alone_keeps_this_machine() -> None:
    config = parse("[thresholds]\nstall_s = 7\n", "x")
    assert list(config.hosts) == ["local"]
    assert config.thresholds.stall_s == 7.0


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file; `eightzeros config path`"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[hosts.a]\n# fa\xe7ade\n")
    with pytest.raises(ConfigError, match=r"latin\.toml:2: not UTF-8"):
        load(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # no TOML
        ("[hosts.a]\nport = \n", "ez.toml:2: not TOML: Invalid value"),
        ("a = 1\na = 2\n", "ez.toml:2: not TOML: Cannot overwrite a value"),
        ('[console]\ntheme = """\nnever closed\n', "ez.toml:3: not TOML: Unterminated string"),
        # unknown keys
        ("[hosts.a]\n\nprot = 22\n", "ez.toml:3: hosts.a.prot: unknown key; did you mean `port`?"),
        ("[host.a]\n", "ez.toml:1: host: unknown key; did you mean `hosts`?"),
        ("[console]\nzebra = 1\n", "ez.toml:2: console.zebra: unknown key; keys here: fps, theme, known_hosts"),
        ("[hosts]\na = {address = 'x',\n}", "ez.toml:2: not TOML: Invalid initial character for a key part"),
        ("[hosts]\na = {address = 'x', prot = 1}\n", "ez.toml:2: hosts.a.prot: unknown key; did you mean `port`?"),
        ("hosts.a.prot = 1\n", "ez.toml:1: hosts.a.prot: unknown key; did you mean `port`?"),
        # types and ranges
        ("[hosts.a]\nport = '22'\n", "ez.toml:2: hosts.a.port: expected a whole number, got text"),
        ("[hosts.a]\nport = true\n", "ez.toml:2: hosts.a.port: expected a whole number, got true or false"),
        ("[hosts.a]\nport = 0\n", "ez.toml:2: hosts.a.port: expected a whole number >= 1"),
        ("[hosts.a]\nport = 65536\n", "ez.toml:2: hosts.a.port: expected a whole number <= 65535"),
        ("[hosts.a]\naddress = 7\n", "ez.toml:2: hosts.a.address: expected text, got a whole number"),
        ("[hosts.a]\nroots = '/d'\n", "ez.toml:2: hosts.a.roots: expected a list, got text"),
        ("[hosts.a]\nroots = [\n '/d',\n 3,\n]\n", "ez.toml:4: hosts.a.roots[1]: expected text, got a whole number"),
        ("[hosts.a]\nconfirm = 'no'\n", "ez.toml:2: hosts.a.confirm: invalid word 'no'; it takes always, never"),
        ("[hosts]\nb = {}\na = 4\n", "ez.toml:3: hosts.a: expected a table, [hosts.a], got a number"),
        ("thresholds = 3\n", "ez.toml:1: thresholds: expected a table, [thresholds], got a number"),
        ("[[hosts]]\naddress = 'x'\n", "ez.toml:1: hosts: write one table a name: [hosts.NAME]"),
        ("stages = 1\n", "ez.toml:1: stages: write one table a name: [stages.NAME]"),
        ("[console]\nfps = nan\n", "ez.toml:2: console.fps: expected a finite number, got nan"),
        ("[console]\nfps = 31\n", "ez.toml:2: console.fps: expected a number <= 30.0"),
        (
            "[stages.x]\ncommand = ['a']\ngrace_s = inf\n",
            "ez.toml:3: stages.x.grace_s: expected a finite number, got inf",
        ),
        (
            "[stages.x]\ncommand = ['a']\n\n[stages.x.env]\nA = '1'\nB = 2\n",
            "ez.toml:6: stages.x.env.B: expected text, got a whole number",
        ),
        (
            "[stages.x]\ncommand = ['a']\nneeds = ['clean']\n",
            "ez.toml:3: stages.x.needs[0]: invalid word 'clean'; it takes clean-gpus",
        ),
        # names
        ("[hosts.'a b']\n", 'ez.toml:1: hosts."a b": this is no name: letters, digits'),
        ("[hosts.'../x']\n", 'ez.toml:1: hosts."../x": this is no name: letters, digits'),
        (f"[stages.{'n' * 65}]\ncommand=['a']\n", "this is no name: letters, digits"),
        # what does not fit together
        ("[hosts.a]\naddress = '-oProxyCommand=x'\n", "ez.toml:2: hosts.a.address: `-oProxyCommand=x` is no address"),
        ("[hosts.a]\naddress = 'a b'\n", "ez.toml:2: hosts.a.address: `a b` is no address"),
        ("[hosts.a]\naddress = ''\n", "ez.toml:2: hosts.a.address: `` is no address"),
        ("[hosts.a]\nuser = 'me'\n", "ez.toml:2: hosts.a.user: there is no SSH to this machine"),
        ("[hosts.a]\npython = ' '\n", "ez.toml:2: hosts.a.python: this is empty"),
        ("[hosts.a]\nroots = ['/d', 'e']\n", "ez.toml:2: hosts.a.roots[1]: `e` must begin with `/` or `~`"),
        ("[stages.x]\nhosts = []\n", 'ez.toml:1: stages.x: this stage needs `command`, or kind = "extract"'),
        (
            "[stages.x]\nkind = 'extract'\ncorpus = 'c'\n",
            'ez.toml:1: stages.x: a stage of kind = "extract" needs `out`',
        ),
        (
            "[stages.x]\nkind = 'extract'\ncorpus = 'c'\nout = '/o'\ncommand = ['a']\n",
            "ez.toml:5: stages.x.command: a stage of kind",
        ),
        ("[stages.x]\ncommand = ['a']\ncorpus = 'c'\n", "ez.toml:3: stages.x.corpus: only a stage of kind"),
        ("[stages.x]\ncommand = ['a']\nserver = 'http://h'\n", "ez.toml:3: stages.x.server: only a stage of kind"),
        (
            "[stages.x]\nkind = 'extract'\ncorpus = 'c'\nout = '/o'\nconcurrency = 8\n",
            'ez.toml:5: stages.x.concurrency: only an extraction with engine = "sglang" has this',
        ),
        (
            "[hosts.a]\n[stages.x]\ncommand = ['a']\nhosts = ['a',\n'b']\n",
            "ez.toml:5: stages.x.hosts[1]: `b` is no host of this file; hosts: a",
        ),
        (
            "[stages.x]\ncommand = ['a']\nenv = {'A-B' = '1'}\n",
            "ez.toml:3: stages.x.env.A-B: this is no name of an environment variable",
        ),
        (
            "[thresholds]\ntemperature_bad_c = 70\ntemperature_warn_c = 75\n",
            "ez.toml:3: thresholds.temperature_warn_c: 75 is not below temperature_bad_c, which is 70",
        ),
        ("[thresholds]\ntemperature_bad_c = 70\n", "ez.toml:1: thresholds.temperature_warn_c: 80 is not below"),
    ],
)
def test_each_mistake_names_file_line_and_key(text: str, said: str) -> None:
    assert said in wrong(text)


def test_lines_are_found_whatever_surrounds_them() -> None:
    text = (
        'note = """\n[hosts.a]\nport = 1\n"""\n'  # 1 to 4
        "other = '''\nhosts.a.port = 2 '''\n"  # 5, 6
        "list = [ # [hosts.a]\n  { port = 'x, ]' },\n  [1, 2], # port = 3\n  \"]\",\n]\n"  # 7 to 11
        "[hosts] # hosts\n"  # 12
        "[hosts . 'a' . \"b\" ]\n"  # 13
        "x . y = 1979-05-27 07:32:00\n"  # 14
        'port = { deep = [ 1,\n 2 ], last = "}" }\n'  # 15, 16
        "[[many]]\nn = 1\n[[many]]\nn = 2\n[many.sub]\nn = 3\n[[many.more]]\n[[many.more]]\nn = 4\n"  # 17 to 25
    )
    tomllib.loads(text)
    for keys, line in {
        ("note",): 1, ("other",): 5, ("list",): 7, ("list", 0, "port"): 8, ("list", 1, 1): 9, ("list", 2): 10,
        ("hosts",): 12, ("hosts", "a"): 13, ("hosts", "a", "b", "x", "y"): 14, ("hosts", "a", "b", "port"): 15,
        ("hosts", "a", "b", "port", "deep", 1): 16, ("hosts", "a", "b", "port", "last"): 16,
        ("hosts", "a", "b", "absent"): 13, ("many", 0, "n"): 18, ("many", 1, "n"): 20,
        ("many", 1, "sub", "n"): 22, ("many", 1, "more", 1, "n"): 25, ("nowhere",): 1,
    }.items():  # fmt: skip
        assert line_of(text, keys) == line, keys


def test_the_documented_example_is_read_and_every_key_is_documented() -> None:
    doc = DOC.read_text()
    example = doc.split("```toml\n", 1)[1].split("```", 1)[0]
    config = parse(example, "docs/configuration.md")
    assert len(config.hosts) >= 2
    assert any(stage.kind == "extract" for stage in config.stages.values())
    for kind in (config, *config.hosts.values(), *config.stages.values(), config.thresholds, config.console):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in doc or f"[{name}." in doc or f"[{name}]" in doc, name
