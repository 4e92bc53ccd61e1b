from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml

from multinode.cluster.hostfile import parse_hostfile, redact_hostfile
from multinode.secret_values import REDACTED, is_secret, redact, redact_file, redact_text, redact_words

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "MYSQL_PWD_PASSWORD", "APIKEY", "hf_hub_token",
        "hub-token", "swanlab_api_key", "wandb.api_key", "MYSQL_PWD", "ssh_passphrase", "Authorization",
        "swanlab_lark_webhook_url", "API_TOKENS", "apiKey",
    ],
)  # fmt: skip
def test_these_names_are_secret(name: str) -> None:
    assert is_secret(name)
    assert is_secret(name.lower())


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_KEY", "DB_PASS", "COMET_KEY", "WANDB_KEY", "NGC_KEY", "KAGGLE_KEY", "MYSQL_PASS", "SENTRY_DSN",
        "STORAGE_SAS", "BLOB_SAS_URL", "COOKIE", "SESSION_COOKIES", "JWT", "CI_JOB_JWT", "GH_PAT", "AZURE_DEVOPS_PAT",
        "MY_KEY_2", "env.TEAM_KEY", "AZURE_STORAGE_CONNECTION_STRING", "DB_CONN_STR", "AWS_CREDS", "BEARER", "PAT",
        "PASS",         "sentry_dsn", "wandb_key", "--openai-key", "db_pass", "gh_pat", "cookie", "jwt",
    ],
)  # fmt: skip
def test_short_names_of_secrets_are_secret_too(name: str) -> None:
    assert is_secret(name)
    assert redact({name: SECRET}) == {name: REDACTED}
    assert SECRET not in redact_text(f"export {name.removeprefix('--')}={SECRET}")


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_SOCKET_IFNAME", "PATH", "PWD", "OLDPWD", "MASTER_ADDR", "TOKENIZERS_PARALLELISM", "tokenizer_name",
        "max_new_tokens", "new_special_tokens", "tokens_per_s", "pad_token", "flops_per_token",
        "MONKEY", "KEYBOARD", "XKEYSYMDB", "COMPASS", "BYPASS", "PATTERN", "PATIENCE", "sort_key", "PUBLIC_KEY", "key",
        "text_key", "keys_to_ignore", "forward_pass", "num_passes", "SASL_MECHANISM", "DSNAME", "model_name_or_path",
        "PYTHONPATH", "PASSES", "dataset_key", "COOKIECUTTER_DIR", "SORT_KEY", "LD_LIBRARY_PATH", "KEY",
    ],
)  # fmt: skip
def test_these_names_are_not(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "value",
    [
        {"hf_hub_token": SECRET}, {"a": [{"password": 123456}]}, {"secrets": {"a": [SECRET, 123456]}},
        {"env": {"X": f"--key=1 --hub-token {SECRET}"}}, ["x", f"token={SECRET}"], ["--api-key", SECRET],
        [1, f"https://me:{SECRET}@host/"],
    ],
)  # fmt: skip
def test_plain_data_keep_no_secret(value: Any) -> None:
    shown = json.dumps(redact(value))
    assert SECRET not in shown
    assert "123456" not in shown
    assert redact(redact(value)) == redact(value)


@pytest.mark.parametrize(
    "value",
    [
        {"max_tokens": 512, "eos_token_id": 2, "hub_private_repo": True, "HF_TOKEN": "$HF_TOKEN", "hub_token": None},
        ["--max_token", "512", "--token", "--use_auth_token", "true"],
        {"missing": {"tokens_per_s": "the job does not say its sequence length"}},
        {"message": "the token of the model is: <pad>", "url": "https://host:80/a@b"},
    ],
)
def test_what_is_no_secret_stays(value: Any) -> None:
    assert redact(value) == value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("export HF_TOKEN=%; a", "export HF_TOKEN='...'; a"),
        ("HF_TOKEN='% x%' b", "HF_TOKEN='...' b"),
        ('X=1 HF_TOKEN="%\\" %" b', "X=1 HF_TOKEN='...' b"),
        ("HF_TOKEN=a'% %'%\nb", "HF_TOKEN='...'\nb"),
        ("HF_TOKEN=\\ % b", "HF_TOKEN='...' b"),
        ("HF_TOKEN=$(echo %) b", "HF_TOKEN='...' b"),
        ("A_TOKEN=% B_TOKEN=% b", "A_TOKEN='...' B_TOKEN='...' b"),
        ("a --token % b", "a --token '...' b"),
        ("a --token=% && b", "a --token='...' && b"),
        ("a --token\t'% %'", "a --token\t'...'"),
        ("a?token=%&b=1", "a?token='...'&b=1"),
        ("curl -H 'Authorization: Bearer %' b", "curl -H 'Authorization: ...' b"),
        ("git clone https://oauth2:%@host/b", "git clone https://oauth2:...@host/b"),
        ('{"api_key":"%", "b": 1}', '{"api_key":"...", "b": 1}'),
        ("{api_key: %, b: 1}", "{api_key: ..., b: 1}"),
        ("# hub_token: %, %\nb: 1", '# hub_token: "..."\nb: 1'),
        ('  "hub_token": "%",\n  "b": 1', '  "hub_token": "...",\n  "b": 1'),
    ],
)
def test_text_keeps_no_secret_and_the_rest(text: str, shown: str) -> None:
    redacted = redact_text(text.replace("%", SECRET))
    assert redacted == shown.replace("...", REDACTED)
    assert redact_text(redacted) == redacted


VALUES = (
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567", "hf_abcdefghijklmnopqrstuvwxyzabcdefgh", "sk-proj-AbC123dEf456GhI789jKl",
    "ghp_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789", "github_pat_11ABCDEFG0abcdefghij_klmnopqrstuv", "AKIAIOSFODNN7EXAMPLE",
    "xoxb-123456789012-abcdefGHIJKL", "glpat-AbCdEfGhIjKlMnOpQrSt",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_values_are_known_by_how_those_who_issue_them_begin_them(value: str) -> None:
    assert redact_text(f"login {value}; train") == f"login {REDACTED}; train"
    assert redact({"x": [f"a={value}"], "y": value}) == {"x": [f"a={REDACTED}"], "y": REDACTED}
    assert redact_words(["train.py", value]) == ("train.py", REDACTED)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (f"wandb login {'0123456789abcdef' * 3}", "wandb login ..."),
        (f"wandb login --relogin {'0123456789abcdef' * 3}", "wandb login --relogin ..."),
        (f"curl -u me:{SECRET} http://host/a", "curl -u me:... http://host/a"),
        (f"curl --user me:{SECRET} a", "curl --user me:... a"),
        (f"docker login -u me -p {SECRET} host", "docker login -u me -p ... host"),
    ],
)
def test_what_a_command_line_gives_a_login_is_no_longer_there(words: str, shown: str) -> None:
    wanted = shown.replace("...", REDACTED)
    assert redact_text(f"x; {words} && b") == f"x; {wanted} && b"
    assert " ".join(redact_words(words.split())) == wanted
    assert redact_text(wanted) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "docker run -u 1000:1000 image", "python -u train.py --user me", "hf_hub_download and hf_transfer_enabled",
        "task-force sk-learn ghp_x AKIA xoxo", "wandb login --relogin", "export SSH_KEY=/home/me/.ssh/id N_KEY=12",
        "keep the key: value of COMPASS=north MONKEY=1 PATH=/usr/bin", "a sk-transformers-are-small-letters b",
    ],
)  # fmt: skip
def test_what_only_looks_alike_stays(text: str) -> None:
    assert redact_text(text) == text
    assert " ".join(redact_words(text.split())) == text


@pytest.mark.parametrize(
    "text",
    ["a_" * 30000 + "KEY", "_" * 60000 + "pass dsn", "hf_" + "a" * 60000, "eyJ" + "a" * 60000, "wandb login " * 5000,
     " -u a:" * 9000, "1_" * 30000 + "PASS=1", "sk-" * 20000, "key_" * 15000, "docker login " * 5000],
    ids=lambda text: text[:8],
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    redact_text(text)
    assert time.process_time() - began < 5


def test_words_are_looked_at_one_by_one() -> None:
    words = (
        "train.py",
        "--hub_token",
        SECRET,
        f"--api-key={SECRET}",
        f"+a.token={SECRET}",
        "--lr",
        "1",
        "--token",
        "-x",
    )
    shown = ("train.py", "--hub_token", REDACTED, f"--api-key={REDACTED}", f"+a.token={REDACTED}", *words[5:])
    assert redact_words(words) == shown


@pytest.mark.parametrize(
    "text",
    [
        f"hub_token: {SECRET}\nlr: 1.0e-4  # low\n", f"lr: 1.0e-4\nhub_token: >-\n  {SECRET}\n  {SECRET}\n",
        f"hub_token:\n  {SECRET}\n", f"a_token: &x {SECRET}\nhub_token: *x\n", f'"hub_token" : "{SECRET}"\n',
        f"? hub_token\n: {SECRET}\n", f"hub_token: !!str {SECRET}\n", f"secrets:\n- {SECRET}\n- {SECRET}\n",
        f'{{"comet": {{"api_key": "{SECRET}", "enabled": true}}}}', f"hub_token: '{SECRET}''{SECRET}'\n",
        f"hub_token: {SECRET} # {SECRET}\n",
    ],
)  # fmt: skip
def test_no_layout_of_a_file_keeps_a_secret(text: str) -> None:
    shown = redact_file(text)
    assert SECRET not in shown
    assert yaml.safe_load(shown) == redact(yaml.safe_load(text))


def test_a_file_without_secrets_is_as_it_was() -> None:
    text = "# max_new_tokens\nmodel_name_or_path:   m\nnew_special_tokens: <a>,<b>\nhub_token: null\n"
    assert redact_file(text) == text


@pytest.mark.parametrize(
    "line",
    [
        f"b env.HF_TOKEN={SECRET} slots=2", f"b 'env.HF_TOKEN={SECRET} {SECRET}' slots=2 # it's env.TOKEN={SECRET}",
        f"""b e"nv.HF_TOKEN="{SECRET}' {SECRET}' slots=2 # don't""", f"# env.HF_TOKEN={SECRET}\r\nb slots=2",
    ],
)  # fmt: skip
def test_a_hostfile_reads_back_without_its_secrets(line: str) -> None:
    text = f"a slots=2 # node's\n{line}\n"
    shown = redact_hostfile(text)
    assert SECRET not in shown
    nodes = parse_hostfile(shown).nodes
    assert [node.slots for node in nodes] == [2, 2]
    assert set(nodes[1].env.values()) <= {REDACTED}
