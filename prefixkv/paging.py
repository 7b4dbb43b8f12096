"""Page arithmetic. One rule: tokens become pages here and nowhere else."""


def page_floor(num_tokens: int, page_size: int) -> int:
    """Largest whole-page token count not above `num_tokens`.

    >>> page_floor(130, page_size=64)
    128
    """
    return num_tokens - num_tokens % page_size


def whole_pages(num_tokens: int, page_size: int) -> int:
    """How many whole pages `num_tokens` fill.

    >>> whole_pages(130, page_size=64)
    2
    """
    return num_tokens // page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold `num_tokens`, a partial last page included.

    >>> pages_for(130, page_size=64)
    3
    """
    return -(-num_tokens // page_size)
