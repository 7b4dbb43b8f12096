"""Page ownership: the allocator, the page table, and every move of a request's pages. Pure."""
