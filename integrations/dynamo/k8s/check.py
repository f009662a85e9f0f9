"""Checks manifests against the schema of Dynamo's custom resource, without a cluster.

    python integrations/dynamo/k8s/check.py CRD MANIFEST...

CRD is `deploy/operator/config/crd/bases/nvidia.com_dynamographdeployments.yaml` of github.com/ai-dynamo/dynamo (1.6 MB,
not part of this repository). Needs PyYAML and jsonschema. A field that is not in the schema is an error, as in the
strict validation of `kubectl apply`. Not checked: CEL rules (`x-kubernetes-validations`), and the operator's webhook.
"""

import sys

import jsonschema
import yaml


def strict(schema):
    """Converts a structural schema to JSON Schema. Fields that the schema does not name are refused, unless it preserves
    unknown fields. An int-or-string field takes either type."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    # Field names below `properties` are not schema keywords.
    made = {key: strict(part) for key, part in schema.items() if key != "properties"}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if "type" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


def problems(definition, manifest):
    spec = definition["spec"]
    versions = {f"{spec['group']}/{version['name']}": version for version in spec["versions"] if version["served"]}
    if manifest["kind"] != spec["names"]["kind"] or manifest["apiVersion"] not in versions:
        expected = f"{spec['names']['kind']} in one of the versions {', '.join(versions)}"
        return [f"{manifest['apiVersion']} {manifest['kind']} is not supported; expected {expected}"]
    schema = strict(versions[manifest["apiVersion"]]["schema"]["openAPIV3Schema"])
    # The API server defines `metadata`.
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]


def main(crd, *paths):
    with open(crd) as file:
        definition = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    wrong = 0
    for path in paths:
        with open(path) as file:
            manifests = [manifest for manifest in yaml.safe_load_all(file) if manifest]
        for manifest in manifests:
            found = problems(definition, manifest)
            wrong += len(found)
            print("\n".join([f"{path}: {manifest['metadata']['name']}: {len(found)} problems", *found]))
    return 1 if wrong or not paths else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
