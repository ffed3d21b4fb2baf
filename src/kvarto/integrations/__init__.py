"""kvarto inside other libraries: transformers (`kvarto.Cache`). Each needs its library, so nothing is imported here."""
