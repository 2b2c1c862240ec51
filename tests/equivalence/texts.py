"""The texts, batches and pairs on which the server is compared with FlagEmbedding.

All were written for this purpose. `word_text` makes texts of an exact number of tokens.
"""

from collections.abc import Mapping

_SINGLE_TOKEN_WORDS = tuple(
    """
    the of and to in is that for it was on with as be at by this have from or one had not but what
    all were when we there can an your which their said if do will each about how up out them then
    she many some so these would other into has more her two like him see time could
    """.split()  # noqa: SIM905 - a literal would be a page of quotes
)


def word_text(tokens: int, variant: int = 0) -> str:
    """A text of exactly `tokens` tokens, ``<s>`` and ``</s>`` included; at least 2."""
    return " ".join(
        _SINGLE_TOKEN_WORDS[(index * index + 3 * index + 7 * variant) % len(_SINGLE_TOKEN_WORDS)]
        for index in range(variant, variant + tokens - 2)
    )


GROUPS: Mapping[str, tuple[str, ...]] = {
    "latin": (
        "A heron waits at the edge of the pond.",
        "Which ferry leaves before noon?",
        "Two ovens, one baker, and no flour left.",
        "The committee postponed its vote until the figures from the second audit were public.",
        "Le boulanger ferme sa boutique à dix-neuf heures.",
        "Où se trouve la clé de l’armoire bleue ?",
        "Der Nachtzug überquert die Brücke ohne zu bremsen.",
        "Die Straße zum Fußballplatz war gesperrt.",
        "El faro se apaga cuando amanece sobre la bahía.",
        "¿Quién dejó la puerta del granero abierta?",
        "Tàu chở gạo rời bến lúc sáng sớm.",
        "Yağmur dinince çocuklar bahçeye koştu.",
        "Mvuvi alirudi nyumbani na kapu tupu.",
        "Żółta łódź zniknęła za wyspą.",
        "Příliš mnoho otázek zůstalo bez odpovědi.",
        "O pescador consertou a rede antes do nascer do sol.",
        "Il faro è spento da tre notti.",
    ),
    "cyrillic": (
        "Старый мост закрыли на ремонт до весны.",
        "Кто оставил зонт у двери библиотеки?",
        "Поезд опоздал на сорок минут.",
        "Пасічник збирає мед наприкінці літа.",
        "Рибарът поправя мрежата си на кея.",
        "Ветар је однео шешир преко трга.",
    ),
    "greek": (
        "Το καράβι έφτασε αργά στο λιμάνι.",
        "Ποιος ξέχασε το βιβλίο πάνω στο τραπέζι;",
        "Η βροχή σταμάτησε πριν από το μεσημέρι.",
        "ΟΔΟΣ και οδός: το τελικό σίγμα.",
    ),
    "arabic": (
        "توقفت السفينة قرب الميناء القديم.",
        "من ترك المصباح مضاءً طوال الليل؟",
        "كَتَبَ الطَّالِبُ رِسَالَةً طَوِيلَةً.",
        "باغبان پیش از طلوع درخت‌ها را آب داد.",
        "ریل گاڑی آج بھی دیر سے آئی۔",
    ),
    "hebrew": (
        "הדייג תיקן את הרשת לפני הזריחה.",
        "מי השאיר את החלון פתוח?",
        "שָׁלוֹם לַיֶּלֶד הַקָּטָן.",
        "מספר הקו הוא 18 ולא 81.",
    ),
    "devanagari": (
        "किसान ने सुबह खेत में पानी दिया।",
        "पुस्तकालय की चाबी किसके पास है?",
        "नदी के उस पार एक पुराना पुल है।",
        "पाऊस थांबल्यावर मुले अंगणात गेली.",
    ),
    "bengali": (
        "নৌকাটি সন্ধ্যার আগে ঘাটে ফিরল।",
        "কে দরজাটা খোলা রেখেছে?",
        "বৃষ্টির পরে আকাশ পরিষ্কার হলো।",
    ),
    "tamil": (
        "மீனவர் வலையை வெயிலில் காயவைத்தார்.",
        "கதவைத் திறந்து வைத்தது யார்?",
        "மழை நின்றதும் பறவைகள் திரும்பின.",
    ),
    "thai": (
        "ชาวนาปล่อยน้ำเข้านาตั้งแต่เช้ามืด",
        "ใครลืมร่มไว้หน้าห้องสมุด",
        "รถไฟขบวนสุดท้ายออกไปแล้วเมื่อสิบนาทีก่อน",
    ),
    "hangul": (
        "어부는 해가 뜨기 전에 그물을 고쳤다.",
        "도서관 앞에 우산을 두고 간 사람이 누구예요?",
        "비가 그치자 아이들이 마당으로 뛰어나갔다.",
        "한글 자모를 풀어 쓴 글",
    ),
    "japanese": (
        "漁師は夜明け前に網を直した。",
        "図書館の前に傘を忘れたのは誰ですか?",
        "最終列車は十分前に出発しました。",
        "カタカナ表記とひらがな表記をまぜて書く。",
        "\uff76\uff9e\uff77\uff9e\uff78\uff9e \uff8a\uff9d\uff76\uff78 ト ゼンカク",
    ),
    "han": (
        "渔夫在日出之前修好了网。",
        "谁把伞忘在图书馆门口了?",
        "最后一班火车十分钟前已经开走。",
        "這座舊橋到明年春天才會重新開放。",
        "第二次审计的数字公布之前,委员会推迟了表决。",
    ),
    "other_indic": (
        "మత్స్యకారుడు వలను బాగు చేశాడు.",
        "ಮಳೆ ನಿಂತ ಮೇಲೆ ಹಕ್ಕಿಗಳು ಮರಳಿದವು.",
        "വാതിൽ തുറന്നിട്ടത് ആരാണ്?",
        "ਕਿਸ਼ਤੀ ਸ਼ਾਮ ਤੋਂ ਪਹਿਲਾਂ ਮੁੜ ਆਈ।",
    ),
    "georgian": ("მეთევზემ ბადე გათენებამდე შეაკეთა.", "ვინ დატოვა კარი ღია?"),
    "armenian": ("Ձկնորսը արևածագից առաջ կարկատեց ցանցը։", "Ո՞վ է բաց թողել դուռը։"),
    "ethiopic": ("ዓሣ አጥማጁ ፀሐይ ሳትወጣ መረቡን ጠገነ።", "በሩን ክፍት የተወው ማን ነው?"),
    "outside_the_vocabulary": ("ᚠᚢᚦᚨᚱᚲ", "𓀀𓂀𓃭", "𐌰𐍄𐍄𐌰 𐌿𐌽𐍃𐌰𐍂", "word ᚠᚢᚦ word 𓀀 word"),
    "mixed_scripts": (
        "Order 17: 三 x чай, 2 x café, 1 x قهوة",
        "the Wörter und слова и λέξεις and 単語",
        "latin مختلط עם עברית 123 abc",
        "ZIP 90210 東京都 〒100-0001",
    ),
    "numbers": (
        "3.14159 2.71828 1.41421",
        "1,234,567.89 and 1.234.567,89",
        "0x7f3a 1e-9 -273.15 50% ±2 №5 §12",
        "٠١٢٣٤٥٦٧٨٩ ०१२३४५६७८९ 0123456789",
        "½ ¼ ¾ ⅓ x² H₂O",
        "2031-02-30T25:61:61Z",
    ),
    "code": (
        "def area(r):\n    return 3.14159 * r ** 2\n",
        "for (size_t i = 0; i < n; ++i) { sum += v[i]; }",
        "SELECT name, COUNT(*) FROM boats WHERE port = 'Ålesund' GROUP BY name;",
        'fn main() { println!("{:?}", (1..=3).map(|x| x * x).collect::<Vec<_>>()); }',
        '{"id": 7, "tags": ["a", "b\\n"], "ok": null}',
        "<div class='box' id=\"x-1\">&nbsp;&lt;p&gt;</div>",
        "grep -rn --include='*.py' 'colour' . | sort -k2 | uniq -c",
        "const f = async (x) => await g?.(x) ?? `n=${x}`;",
        "\tif\t(a\t&&\tb)\t{\r\n\t\treturn;\r\n\t}\r\n",
        "^(?:[a-z0-9_]+\\.)*[a-z]{2,}$",
        '#!/bin/sh\nset -eu\necho "$1" >&2',
        "a_long_snake_case_identifier aLongCamelCaseIdentifier A-LONG-KEBAB-CASE",
    ),
    "urls": (
        "https://example.org/a/b?c=d&e=%20f#g",
        "http://user:secret@192.0.2.17:8080/index.html",
        "ftp://files.example.net/pub/readme.txt",
        "https://пример.испытание/путь?ключ=значение",
        "mail the.first+tag@example.com or call +1 (555) 010-0199",
        "C:\\Users\\kim\\notes\\draft (2).txt",
        "s3://bucket-name/some/deep/prefix/part-00001-of-00032.parquet",
        "data:text/plain;base64,SGVsbG8sIHdvcmxkIQ==",
    ),
    "emoji": (
        "🙂",
        "🚀🚀🚀",
        "Good morning ☀️ and good night 🌙",
        "👩‍👩‍👧‍👦 at the beach",
        "👩🏽‍🚀 👨🏿‍🔬 🧑🏻‍🎨",
        "🏳️‍🌈 🏴‍☠️ 🇳🇴🇯🇵",
        "👍🏻👍🏼👍🏽👍🏾👍🏿",
        "1️⃣ 2️⃣ #️⃣ *️⃣",
        "❤️‍🔥 vs ❤ 🔥",
        "text with a stray selector\ufe0f and joiner\u200d",
        "¯\\_(ツ)_/¯ (╯°□°)╯︵ ┻━┻",
    ),
    "combining_and_compatibility": (
        "e\u0301te\u0301 and été",
        "a\u0308o\u0308u\u0308 äöü",
        "Z\u0335\u0321\u031b\u0300a\u0334\u0315l\u0336\u0322g\u0335\u0327o\u0334\u0323",
        "\u0301\u0301\u0301",
        "\u1112\u1161\u11ab\u1100\u1173\u11af",
        "Å \u212b A\u030a",
        "ﬁne ﬂow oﬃce ﬀ",
        "Fullwidth \uff21\uff22\uff23\uff11\uff12\uff13\uff01",
        "① ② ㈱ ㍿ ㎏ ℃ ™",
        "\U0001d54f\U0001d550 \U0001d400\U0001d401 𝓈𝒸𝓇𝒾𝓅𝓉",
        "İstanbul ıI ẞß ſ",
        "क\u094dष त\u094dर ज\u094dञ",
    ),
    "repeated": (
        "no no no no no no no no",
        "buffalo Buffalo buffalo Buffalo buffalo",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "hahahahahahahahahahahaha",
        "!!!!!!!!!!!!!!!!!!!!????????????",
        "。。。。。。。。。。",
        "-" * 120,
        "0" * 200,
        "the cat the dog the bird the fish the cat the dog",
        "漢漢漢漢漢漢漢漢漢漢漢漢",
    ),
    "literal_special_tokens": (
        "<s>",
        "</s>",
        "<pad>",
        "<unk>",
        "<mask>",
        "<s> </s> <pad> <unk> <mask>",
        "<s>nested</s>",
        "fill the <mask> here",
        "fill the<mask>here and<mask> here",
        "<mask><mask><mask>",
        "<pad> in front and behind <pad>",
        "an <unk> word and a <UNK> word",
        "<S> <Mask> < mask > <|mask|> [MASK] [CLS]",
        "</s></s> two closing marks",
        "▁ the meta symbol ▁▁ itself",
    ),
    "nearly_nothing": (
        "",
        " ",
        "      ",
        "\n",
        "\t\t",
        "\r\n\r\n",
        "\u00a0",
        "\u3000\u2003\u2009",
        "\u200b",
        "\u200b\u200c\u200d\u2060\ufeff",
        "\x00",
        ".",
        "a",
        "I",
        "字",
        "ß",
        "7",
    ),
    "whitespace_and_control": (
        "  leading and trailing  ",
        "many      inner       spaces",
        "line one\nline two\n\nline four\n",
        "tab\tseparated\tvalues",
        "carriage\rreturn",
        "non\u00a0breaking\u202fspaces\u2007here",
        "NUL\x00inside and at the end\x00",
        "bell\x07 escape\x1b[31m delete\x7f",
        "soft\u00adhyphen zero\u200bwidth",
        "\ufeffbyte order mark first",
        "\u202eright to left override\u202c and back",
        "\u2066isolate\u2069 \u200fmark\u200e",
        "line\u2028separator\u2029paragraph",
        "private \ue000 use \U000f0000 planes",
        "noncharacters \ufffe \uffff \U0010ffff and replacement \ufffd",
    ),
    "lengths": tuple(
        word_text(tokens, variant=tokens)
        for tokens in (
            *(3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96),
            *(126, 127, 128, 129, 130, 200, 255, 256, 257, 384, 511, 512, 513, 768, 1024),
        )
    ),
    "paragraphs": (
        " ".join(
            f"Entry {number}: the harbour master noted a wind of {number % 9 + 3} knots, "
            f"{number * 7 % 40} boats at anchor and nothing else worth writing down."
            for number in range(1, 13)
        ),
        " ".join(
            f"第{number}天,渔船在{number % 12 + 1}点出海,带回{number * 13 % 90}公斤鱼。"
            for number in range(1, 25)
        ),
        "".join(
            f"def step_{number}(state):\n    state[{number}] = {number * 7}\n    return 1\n\n"
            for number in range(20)
        ),
    ),
}
"""Texts of up to 1024 tokens by what makes them hard."""

TEXTS: tuple[str, ...] = tuple(text for group in GROUPS.values() for text in group)

LONG_TEXTS: Mapping[str, str] = {
    "2048 tokens": word_text(2048),
    "8191 tokens": word_text(8191),
    "8192 tokens": word_text(8192),
    "8193 tokens": word_text(8193, variant=1),
    "20000 tokens": word_text(20_000, variant=2),
    "beyond the limit without a space": "水" * 9_000,
}
"""Texts around and beyond the model's 8192 tokens."""

BATCHES: tuple[tuple[int, ...], ...] = tuple(
    tuple((start + stride * place) % len(TEXTS) for place in range(size))
    for size, start, stride in (
        (1, 0, 1),
        (2, 5, 101),
        (3, 250, 17),
        (5, 40, 53),
        (8, 11, 29),
        (13, 90, 7),
        (24, 3, 11),
        (32, 60, 5),
        (47, 200, 3),
        (64, 1, 7),
    )
)
"""Requests of 1 to 64 texts of mixed lengths, as places in `TEXTS`."""

PAIRS: tuple[tuple[str, str], ...] = (
    ("Which ferry leaves before noon?", "The first ferry leaves at nine, the second one at noon."),
    ("Which ferry leaves before noon?", "谁把伞忘在图书馆门口了?"),
    ("Where is the umbrella?", "Who left the umbrella in front of the library?"),
    ("Кто оставил зонт?", "Кто оставил зонт у двери библиотеки?"),
    ("the cat", "the cat the dog the bird the fish the cat the dog"),
    ("no no no", "no no no no no no no no"),
    ("same text on both sides", "same text on both sides"),
    ("fill the <mask> here", "another <mask> to fill"),
    ("<unk> <pad>", "<unk> <pad>"),
    ("", "a text that meets nothing"),
    ("a query that meets nothing", ""),
    ("", ""),
    ("apple", "水"),
    ("def area(r):", "def area(r):\n    return 3.14159 * r ** 2\n"),
    ("👩🏽‍🚀", "👩🏽‍🚀 👨🏿‍🔬 🧑🏻‍🎨"),
    (word_text(40), word_text(300, variant=3)),
)
"""Query and passage, for scores."""
