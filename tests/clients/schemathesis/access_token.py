"""Prints an access token for the key owner.key in a folder, and writes client.crt for that key beside it.

Usage: access_token.py FOLDER URL
"""

import base64
import datetime
import hashlib
import json
import os
import sys
import time

import requests
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def write_certificate(key, path: str) -> None:
    """Writes a self-signed certificate, as the service expects of a client."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
    builder = builder.public_key(key.public_key()).not_valid_before(now - day).not_valid_after(now + day)
    with open(path, "wb") as file:
        file.write(builder.sign(key, None).public_bytes(serialization.Encoding.PEM))


def sign_assertion(key, audience: str) -> str:
    """Signs an assertion (RFC 7523) with the id that RFC 7638 gives the key."""
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    jwk = '{"crv":"Ed25519","kty":"OKP","x":"%s"}' % base64url(raw)
    kid = base64url(hashlib.sha256(jwk.encode()).digest())
    now = int(time.time())
    header = {"alg": "EdDSA", "typ": "muster-assertion+jwt", "kid": kid}
    claims = {"iss": kid, "sub": kid, "aud": audience, "iat": now, "exp": now + 60, "jti": os.urandom(16).hex()}
    signed = ".".join(base64url(json.dumps(part).encode()) for part in (header, claims))
    return f"{signed}.{base64url(key.sign(signed.encode()))}"


def main() -> None:
    folder, url = sys.argv[1:]
    with open(f"{folder}/owner.key", "rb") as file:
        key = serialization.load_pem_private_key(file.read(), None)
    write_certificate(key, f"{folder}/client.crt")
    session = requests.Session()
    session.verify = f"{folder}/keys/tls.crt"
    session.cert = (f"{folder}/client.crt", f"{folder}/owner.key")
    issuer = session.get(f"{url}/v1/context", timeout=10).json()["issuer"]
    grant = "urn:ietf:params:oauth:grant-type:jwt-bearer"
    form = {"grant_type": grant, "assertion": sign_assertion(key, issuer)}
    print(session.post(f"{url}/v1/token", data=form, timeout=10).json()["access_token"])


main()
