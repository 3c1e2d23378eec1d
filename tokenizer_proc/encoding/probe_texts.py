"""The texts on which a fast tokenizer must agree with the exact one before it is used.

Tokenizers differ at the edges of their pre-tokenizers (scripts, marks, digits, contractions,
whitespace). They also differ in normalization, in byte fallback, and around added tokens. Every
text here is about some of these, and short: the check is a part of every start.
"""

# ruff: noqa: RUF001

CORPUS = [
    "",
    " ",
    "The quick brown fox doesn't jump; it'll wait, they've said. I'M SURE WE'RE FINE 'S",
    "  two  spaces   three\ttab\t\ttabs\n\n\nlines \r\n windows \n \n x \u00a0nbsp\u3000wide",
    " " * 37 + "x" + "\n" * 19 + "\t" * 11 + " \n" * 7 + "end   ",
    "0 1 12 123 1234 12345678901234567890 3.14159 1,000,000 1e-9 0xDEADBEEF v1.2.3 ½ ² ٣٤ ४५ Ⅻ",
    "Supercalifragilisticexpialidocious antidisestablishmentarianism " + "ab" * 60 + "Z" * 70,
    "Ünïcödé naïve façade Straße ŒUVRE ﬁne ﬂow ǅ İstanbul ıçin Ångström Ångström ñ ñ",
    "e\u0301\u0327 a\u0308\u0304 o\u0302\u0323 \u1100\u1161\u11a8 \u212b \u2126 \u1fef \ufb2c",
    "Привет, как дела? Съешь же ещё этих мягких французских булок. Ґанок",
    "Καλημέρα κόσμε, τι κάνεις; ΣΊΣΥΦΟΣ ὁ ἄνθρωπος",
    "שלום עולם, מה שלומך? בְּרֵאשִׁית",
    "مرحبا بالعالم، كيف حالك؟ السَّلَامُ عَلَيْكُمْ ۱۲۳",
    "नमस्ते दुनिया, आप कैसे हैं? क्षत्रिय",
    "বাংলা ভাষা தமிழ் மொழி తెలుగు ಕನ್ನಡ മലയാളം සිංහල ਪੰਜਾਬੀ ગુજરાતી",
    "สวัสดีชาวโลก ภาษาไทยไม่มีเว้นวรรค ລາວ မြန်မာ ភាសាខ្មែរ བོད་སྐད",
    "你好,世界。今天天气很好!「引号」《書名》繁體字與简体字",
    "こんにちは世界。カタカナ、ひらがな、漢字。ｶﾀｶﾅ ＦＵＬＬ　ＷＩＤＴＨ １２３",
    "안녕하세요 세계. 한국어 띄어쓰기 ㅋㅋㅋ",
    "Xin chào thế giới, Tiếng Việt có nhiều dấu. Dünya'ya merhaba. Cześć, źdźbło. Příliš",
    "አማርኛ ქართული Հայերեն ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ᠮᠣᠩᠭᠣᠯ 𐍈𐌰𐌿 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 𒀀𒀁",
    "😀 😃😄 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪 ❤️ ☕ ✈︎ 🫠 #️⃣",
    "a\u200bb\u200cc\u200dd\u2060e\ufefff \u202eright\u202c",
    "\x00\x01\x04\x7f\x85 \ufffd \U0010ffff \ue000 \U00040000",
    "<|im_start|>user\nforged<|im_end|> <s> </s> <unk> [INST] [/INST] <|endoftext|> <bos>",
    "<|begin_of_text|>x<|eot_id|>  <|end|>   [CLS] [MASK] [SEP]  <mask>  <pad> <0x0A> ▁",
    "def f(x: int = 1) -> dict:\n    # a comment\n\treturn {'a': x ** 2, \"b\": [*x]}\n",
    "#include <vector>\nint main() { for (auto& p : v) if (p != nullptr && !done) ++n; }\n",
    '{"key": [1, 2.5, null, true], "url": "https://example.org/a_b-c?q=%20x&y=z#top"}',
    "SELECT * FROM t WHERE a >= 10; <div class='x'>&amp;</div> $x^2 + \\frac{1}{2}$ C:\\dir",
    "camelCaseWord snake_case_word kebab-case UPPERCASE MiXeD word123word user@example.org #tag",
    "!!! ??? ... --- === *** /// ((( ))) [[[ ]]] {{{ }}} ::: ;;; ,,, '''\"\"\"```",
    "… — – “quoted” ‘x’ «y»",
]
