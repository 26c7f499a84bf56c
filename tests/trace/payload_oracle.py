"""A second reader of payloads, written from docs/formats.md in plain Python, bit by bit. Slow and obvious."""


def bits_of(words):
    return [(int(word) >> i) & 1 for word in words for i in range(64)]


def number(bits, start, count):
    return sum(bit << i for i, bit in enumerate(bits[start : start + count]))


def read_fixed(words, num_rows, top_k, width):
    bits = bits_of(words)
    return [[number(bits, (row * top_k + k) * width, width) for k in range(top_k)] for row in range(num_rows)]


def symbols_of(num_experts, top_k):
    """(first gap, extra bits) of each symbol."""
    gaps = num_experts - top_k + 1
    if num_experts <= 256:
        return [(gap, 0) for gap in range(gaps)]
    symbols = [(gap, 0) for gap in range(min(gaps, 64))]
    gap = 64
    while gap < gaps:
        extra = gap.bit_length() - 4
        symbols.append((gap, extra))
        gap += 2**extra
    return symbols


def codes_of(lengths):
    """Code (a string of bits, first bit first) of each symbol, as a dictionary from code to symbol."""
    codes, code, last = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths)):
        code <<= length - last
        codes[format(code, f"0{length}b")] = symbol
        code, last = code + 1, length
    return codes


def read_planes(words, num_rows, num_experts, top_k, code_lengths):
    head = [int(word) for word in words[:2]]
    ends = [head[0] & 0xFFFFFFFF, head[0] >> 32, head[1] & 0xFFFFFFFF, head[1] >> 32]
    order, start = list(range(num_experts)), 2
    if num_rows * top_k >= 16 * num_experts:
        width = 1 if num_experts <= 256 else 2
        table = b"".join(int(word).to_bytes(8, "little") for word in words[2:])
        order = [int.from_bytes(table[r * width : (r + 1) * width], "little") for r in range(num_experts)]
        start += -(-num_experts * width // 8)
    bits, books = bits_of(words[start:]), [codes_of(lengths) for lengths in code_lengths]
    symbols = symbols_of(num_experts, top_k)
    rows, position = [], 0
    for lane in range(4):
        for _ in range(num_rows // 4 if lane < 3 else num_rows - 3 * (num_rows // 4)):
            ids, rank = [], -1
            for k in range(top_k):
                book, code = books[k * len(books) // top_k], ""
                while code not in book:
                    code += str(bits[position])
                    position += 1
                first, extra = symbols[book[code]]
                rank += 1 + first + number(bits, position, extra)
                position += extra
                ids.append(order[rank])
            rows.append(sorted(ids))
        assert position == ends[lane]
    return rows


def read_rice(words, num_rows, num_choices, *, by_change=False):
    """None, or a list of ids, for each row; of `rice-changes` where a list may say what changed."""
    bits, position, rows = bits_of(words[:-1]), 0, []

    def unary():
        nonlocal position
        start = position
        while not bits[position]:
            position += 1
        position += 1
        return position - 1 - start

    def low(count):
        nonlocal position
        position += count
        return number(bits, position - count, count)

    def whole():
        z = unary()
        return 2**z + low(z)

    def listed(count, b):
        nonlocal parameter
        if not count:
            return []
        t, ids = unary(), []
        parameter = b + t // 2 if t % 2 == 0 else b - (t + 1) // 2
        for _ in range(count):
            gap = unary() * 2**parameter
            ids.append(gap + low(parameter) + (ids[-1] + 1 if ids else 0))
        return ids

    before, parameter, parameters = [], 0, {0: 0, 1: 0}
    for _ in range(num_rows):
        state = whole()
        if state <= 2:
            rows.append(None if state == 1 else [])
            continue
        if not by_change:
            rows.append(listed(state - 2, (num_choices // (state - 2)).bit_length() - 1))
            continue
        count = len(before) if state == 3 else state - 3
        mode = low(1) if before else 0
        size = whole() - 1 if mode else count
        ids = listed(size, parameters[mode])
        parameters[mode] = parameter if size else parameters[mode]
        before = sorted(set(before) ^ set(ids)) if mode else ids
        assert len(before) == count
        rows.append(before)
    assert not any(bits[position:])
    assert len(bits) - position < 64
    assert words[-1] == 0
    return rows
