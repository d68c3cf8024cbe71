"""Recognizes files that usually hold secrets, by their names and by how they begin, so that no package takes them."""

import re
from pathlib import Path

_CODE = "py|pyi|pyx|c|cc|cpp|cu|cuh|h|hpp|md|pub|rst"
_DATA = "bak|cfg|conf|csv|ini|json|old|toml|txt|xml|ya?ml"
_FIRST_WORDS = "credentials?|(?:client[-_])?secrets?|passwords?|passwd|service[-_]account"
_LAST_WORDS = f"{_FIRST_WORDS}|token|api[-_]?key|access[-_]key|private[-_]key"
PATTERN = (
    rf"^(?!.*\.(?:{_CODE})$)(?:"
    r".*\.(?:env|env\.local|pem|key|ppk|p12|pfx|pkcs12|jks|keystore|kdbx|ovpn|kubeconfig|tfvars|tfstate(?:\..*)?)"
    r"|id_(?:rsa|dsa|ecdsa|ed25519).*|id_[^.]*|_netrc|env\.local|.*htpasswd|kubeconfig.*"
    rf"|(?:.*[-_. ])?(?:{_LAST_WORDS})(?:\.(?:{_DATA}))?"
    rf"|(?:{_FIRST_WORDS})[-_. ][^.]*(?:\.(?:{_DATA}))?)$"
)
"""Names of such files, in any case; those that are hidden go with no package anyway. The page has the same pattern."""
_NAME = re.compile(PATTERN, re.IGNORECASE)
_IS_CODE = re.compile(rf".*\.(?:{_CODE})", re.IGNORECASE)
_KEY = re.compile(
    rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File|\"private_key\"\s*:|^\s*aws_secret_access_key\s*=",
    re.IGNORECASE | re.MULTILINE,
)
_NUM_BYTES = 16_384
"""So much of the beginning of a file is searched for a key."""


def is_secret_name(name: str) -> bool:
    """Whether files or folders of that name usually hold a secret: keys, tokens, passwords, settings with such."""
    return _NAME.match(name) is not None


def holds_a_key(file: Path) -> bool:
    """Whether a file that is not code begins with a private key, or with the credentials of a cloud."""
    if _IS_CODE.fullmatch(file.name):
        return False
    try:
        with file.open("rb") as content:
            return _KEY.search(content.read(_NUM_BYTES)) is not None
    except OSError:
        return False  # whoever packs it says so
