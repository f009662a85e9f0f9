"""Makes the certificates of tests/it/serve/tls.rs (pip install cryptography): a root that only the test's client trusts, the
server's certificate, and a key that belongs to neither. The certificates are valid from 2000 to 2126 and protect nothing."""

from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

FOLDER = Path(__file__).parent


def named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def certificate(name, key, issuer, issuer_key, is_root):
    builder = x509.CertificateBuilder(named(issuer), named(name), key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime(2000, 1, 1)).not_valid_after(datetime(2126, 1, 1))
    builder = builder.add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
    if not is_root:
        names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def private(key):
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


root, server, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
(FOLDER / "root.pem").write_bytes(certificate("Bursar's tests", root, "Bursar's tests", root, True))
(FOLDER / "server.pem").write_bytes(certificate("localhost", server, "Bursar's tests", root, False))
(FOLDER / "server.key").write_bytes(private(server))
(FOLDER / "other.key").write_bytes(private(other))
