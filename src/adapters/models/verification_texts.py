"""Texts on which a prepared model is compared with its source: many languages, many lengths."""

_PARAGRAPH = (
    "Retrieval systems answer questions by looking for passages that speak of the same thing. "
    "A dense vector captures what a passage is about, so that a question finds it although no "
    "word is shared; lexical weights keep the exact names, numbers and codes that a vector blurs; "
    "and one vector for each token lets every word of the question look for its own counterpart. "
)

VERIFICATION_TEXTS = (
    "ok",
    "What is a vector database?",
    "error code 0x80070057",
    "Zürich–Genf: 2 h 45 min, 1. Klasse CHF 92.–",
    "Der schnelle braune Fuchs springt über den faulen Hund und verschwindet im Wald.",
    "¿Cuál es la diferencia entre la similitud del coseno y el producto escalar?",
    "La tour Eiffel mesure 330 mètres et reçoit près de sept millions de visiteurs par an.",
    "機械学習モデルの推論を高速化するには、量子化と演算の融合が有効です。",
    "如何在没有显卡的服务器上部署多语言文本检索系统？",
    "다국어 임베딩 모델은 서로 다른 언어의 문장을 같은 공간에 배치한다.",
    "Как правильно хранить векторные представления документов на диске?",
    "ما هي أفضل طريقة للبحث في المستندات الطويلة متعددة اللغات؟",
    "बहुभाषी खोज प्रणाली एक ही प्रश्न से कई भाषाओं के उत्तर ढूँढ सकती है।",
    "Làm thế nào để so sánh hai đoạn văn bản viết bằng hai ngôn ngữ khác nhau?",
    "ระบบค้นหาข้อความหลายภาษาต้องเข้าใจคำถามสั้น ๆ และเอกสารยาว",
    "def cosine(a, b):\n    return a @ b / (norm(a) * norm(b))  # both float32",
    _PARAGRAPH,
    _PARAGRAPH * 3,
)
