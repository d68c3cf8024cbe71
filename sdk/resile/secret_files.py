"""Recognizes files that usually hold secrets, by their names and by how they begin, so that no package takes them."""

import re
from pathlib import Path

_CODE = "py|pyi|pyx|c|cc|cpp|cu|cuh|h|hpp|md|pub|rst"
_DATA = "cfg|conf|csv|ini|json|toml|txt|xml|ya?ml|gpg|zip|tar\\.gz"
_BACKUP = r"(?:~|#|\.(?:bak|backup|old|orig|save|swp|tmp|\d+))*"
_OF = "api|access|auth|bearer|refresh|hf|huggingface|github|gitlab|wandb|openai|anthropic|slack|aws|gcp|azure|stripe"
_WORDS = (
    "credentials?|creds|(?:client[-_])?secrets?|passwords?|passwd|service[-_]account|private[-_]key"
    f"|(?:{_OF})[-_]?(?:tokens?|keys?)|htpasswd"
)
_SUFFIXES = (
    "env|env\\.local|pem|key|ppk|p8|p12|pfx|pkcs12|jks|keystore|keytab|kdbx|ovpn|kubeconfig|kubeconfig\\.ya?ml"
    "|tfvars|tfvars\\.json|tfstate"
)
_NAMES = (
    r"id_(?:rsa|dsa|ecdsa|ed25519|xmss).*|_?netrc|env\.(?:local|prod|production|staging|dev|sh)|kube[._-]?config.*"
    r"|token(?:\.(?:txt|json|pickle|pkl))?|kaggle\.json|auth\.json|rootkey\.csv|.*accesskeys\.csv|tfplan|rclone\.conf"
    r"|pgpass(?:\.conf)?|krb5cc.*|accesstokens\.json|msal_token_cache.*|secring.*|key4\.db|logins\.json|.*_history"
    r"|client[-_]secret.*|(?:credentials?|secrets|service[-_]account)[-_. ].*"
)
PATTERN = (
    rf"^#?(?!.*\.(?:{_CODE})$)(?:.*\.(?:{_SUFFIXES})|{_NAMES}|(?:.*[-_. ])?(?:{_WORDS})(?:\.(?:{_DATA}))?){_BACKUP}$"
)
"""Names of such files, in any case; those that are hidden go with no package anyway. The page has the same pattern."""
_NAME = re.compile(PATTERN, re.IGNORECASE)
_IS_CODE = re.compile(r".*\.(?:py|pyi|pyx|c|cc|cpp|cu|cuh|h|hpp)", re.IGNORECASE)
_KEY = re.compile(
    rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY|PuTTY-User-Key-File|\"(?:private_key|refresh_token|SecretAccessKey)\" ?:"
    rb"|\b(?:aws_)?secret_access_key\"? ?[=:]|\bAccountKey=|\bclient-key-data ?:"
    rb"|\bhf_[A-Za-z]{34}\b|\bghp_[A-Za-z0-9]{36}\b|\bsk-[A-Za-z0-9_-]{40}",
    re.IGNORECASE,
)
_NUM_BYTES = 65_536
"""So much of the beginning of a file is searched for a key."""


def is_code(name: str) -> bool:
    """Whether a file of that name is code, which goes whole."""
    return _IS_CODE.fullmatch(name) is not None


def is_secret_name(name: str) -> bool:
    """Whether files or folders of that name usually hold a secret: keys, tokens, passwords, settings with such."""
    return _NAME.match(name) is not None


def holds_a_key(file: Path) -> bool:
    """Whether a file that is not code begins with a private key, a known kind of token, or credentials of a cloud."""
    if is_code(file.name):
        return False
    try:
        with file.open("rb") as content:
            return _KEY.search(content.read(_NUM_BYTES)) is not None
    except OSError:
        return False  # whoever packs it says so
