"""The license in a model card: chosen for the export, or copied from the card of the original model."""

from __future__ import annotations

import re

from jaxgpt.convert.card.original import Card
from jaxgpt.errors import UserError, short_repr

# The license in a card's metadata: a name, or a list of names on the next lines.
LICENSE = re.compile(r"^license(?:_name|_link)?:(?: *\S[^\n]*|(?:\n *- *\S[^\n]*)+)$", re.MULTILINE)


def check_license(name: str) -> None:
    """Raise `UserError` if a license is not an identifier of the hub, such as apache-2.0; "": no license."""
    if name and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise UserError(
            f"license {short_repr(name)} is not a license identifier of the hub: use, for example, apache-2.0, mit or other"
        )


def license_metadata(chosen: str, original: Card) -> list[str]:
    """Return the metadata entries of the license `chosen` or, if it is "", of the original model's license."""
    if chosen:
        return [f"license: {chosen}"]
    return LICENSE.findall(original.metadata)


def license_section(chosen: str, original: Card) -> str:
    """Describe the license and its source."""
    if chosen:
        text = f"{chosen}, as chosen for this export."
    elif LICENSE.search(original.metadata):
        text = "The license is in the metadata above. It was copied from the original model."
    else:
        text = "Unknown: the run does not record a license."
    return f"## License\n\n{text}\n"
