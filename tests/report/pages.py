"""What a reader sees of a page."""

import html
import re


def text_of(page):
    body = page.partition("<body>")[2]
    plain = html.unescape(re.sub(r"<[^>]+>", " ", body)).replace("\N{NO-BREAK SPACE}", " ")
    return re.sub(r"\s+", " ", plain)


def rows_of(page):
    """The cells of every row of every table, by the first of them; of several such rows the last."""
    rows = re.findall(r"<tr[^>]*>(<th scope=\"row\">.*?)</tr>", page)
    cells = [
        [text_of(f"<body>{cell}").strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows
    ]
    return {row[0]: row[1:] for row in cells}


def plots_of(page):
    said = re.findall(
        r'<img src="data:image/svg\+xml;base64,[^"]+" alt="([^"]+)">', page.replace("\N{NO-BREAK SPACE}", " ")
    )
    return {title: rest for title, _, rest in (words.partition(". ") for words in said)}
