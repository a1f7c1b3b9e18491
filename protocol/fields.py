"""Numbers and texts that several records consist of, each with its bounds."""

from typing import Annotated

import msgspec

MAX_RAILS = 32

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Landing = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
RailNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RAILS)]
Immediate = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
