"""The configuration page is what the code says."""

from pathlib import Path

from engine.config_reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine-configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run python -m engine.config_reference > docs/engine-configuration.md"


def test_every_field_has_its_default_and_its_meaning() -> None:
    assert "| `max_overtakes` | `64` | *(ours)* Times that later requests may pass" in reference()
    assert "- `block_size`: deprecated, it is page_size" in reference()
