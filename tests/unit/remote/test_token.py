import hmac
from pathlib import Path

import pytest

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.remote import token

SECRET = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str):
    token.check_address(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3"])
def test_any_other_address_needs_one(host: str):
    with pytest.raises(ConfigError, match="needs a token"):
        token.check_address(host, None)
    token.check_address(host, SECRET)


def test_a_name_is_no_address():
    with pytest.raises(ConfigError, match="write an IP address"):
        token.check_address("myhost", SECRET)


def test_it_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(token.VARIABLE, raising=False)
    assert token.find(None, "--token-file") is None
    file = tmp_path / "t"
    file.write_text(SECRET + "\n")
    assert token.find(str(file), "--token-file") == SECRET
    monkeypatch.setenv(token.VARIABLE, SECRET * 2)
    assert token.find(None, "--token-file") == SECRET * 2
    assert token.find(str(file), "--token-file") == SECRET


@pytest.mark.parametrize(
    "text", ["", "short", "with a space in it, long", "ümlaut-0123456789", "two\nlines-0123456789"]
)
def test_what_can_be_guessed_or_not_be_sent_is_refused(tmp_path: Path, text: str):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match="holds no token"):
        token.find(str(tmp_path / "t"), "--token-file")


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        token.find(str(tmp_path / "none"), "--token-file")


def test_comparison_takes_as_long_whatever_is_wrong(monkeypatch: pytest.MonkeyPatch):
    compared, real = [], hmac.compare_digest
    monkeypatch.setattr(token.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    for header in (None, "", "Bearer", f"Bearer {SECRET}x", f"bearer {SECRET}", "Bearer \udcff"):
        assert not token.fits(header, SECRET)
    assert len(compared) == 6
