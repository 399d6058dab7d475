//! JSON as it was written: the order of the members and the text of every value stay.
//!
//! Must not know which values may differ. Invariant: two documents with equal leaves are equal bytes but for white space between
//! tokens. One exception: etcd sorts members of a cluster by their ids, which are random, so here those without a name, which never
//! started, come last, and a leaf of its own says whether the ids were in order.

/// A value of a document.
enum Json {
    /// Members in their order, names and all texts as they were written.
    Object(Vec<(String, Json)>),
    Array(Vec<Json>),
    /// A string with its quotes, a number, or a word.
    Scalar(String),
}

/// A value that holds no others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JsonLeaf {
    /// The member that holds it after the one around that, such as `header.revision`; of a member at the top its name.
    pub(crate) field: String,
    /// From the top, such as `kvs[1].key`: no two leaves of a document have the same.
    pub(crate) path: String,
    /// The text of the value.
    pub(crate) text: String,
}

/// A position in a text.
struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

/// The documents that follow each other in a body; `None` where it holds anything else.
pub(crate) fn split(body: &[u8]) -> Option<Vec<&str>> {
    let mut scanner = Scanner { text: str::from_utf8(body).ok()?, at: 0 };
    let mut documents = Vec::new();
    loop {
        scanner.skip_space();
        if scanner.at == scanner.text.len() {
            return Some(documents);
        }
        let start = scanner.at;
        scanner.value()?;
        documents.push(&scanner.text[start..scanner.at]);
    }
}

/// The white space behind each document.
pub(crate) fn spaces(body: &[u8]) -> Vec<String> {
    let documents = split(body).unwrap_or_default();
    let text = str::from_utf8(body).unwrap_or_default();
    let mut rest = text;
    let mut spaces = Vec::new();
    for document in documents {
        let after = rest.find(document).expect("it was found here") + document.len();
        rest = &rest[after..];
        spaces.push(rest[..rest.len() - rest.trim_start().len()].to_owned());
    }
    spaces
}

/// The leaves of a document in their order; `None` where it is none.
pub(crate) fn leaves(document: &str) -> Option<Vec<JsonLeaf>> {
    let mut scanner = Scanner { text: document, at: 0 };
    let value = scanner.value()?;
    scanner.skip_space();
    let mut leaves = Vec::new();
    (scanner.at == document.len()).then(|| collect("", "", &value, &mut leaves))?;
    Some(leaves)
}

fn collect(field: &str, path: &str, value: &Json, out: &mut Vec<JsonLeaf>) {
    let mut leaf = |text: &str| {
        out.push(JsonLeaf { field: field.into(), path: path.into(), text: text.into() });
    };
    match value {
        Json::Object(members) if members.is_empty() => leaf("{}"),
        Json::Array(values) if values.is_empty() => leaf("[]"),
        Json::Scalar(text) => leaf(text),
        Json::Object(members) => {
            let around = field.rsplit('.').next().unwrap_or_default();
            for (name, inner) in members {
                let join = |above: &str| {
                    if above.is_empty() { name.clone() } else { format!("{above}.{name}") }
                };
                collect(&join(around), &join(path), inner, out);
            }
        }
        Json::Array(values) if field == "members" => {
            let ids: Vec<u64> =
                values.iter().filter_map(|member| member.text_of("ID")?.parse().ok()).collect();
            leaf(if ids.is_sorted() { "by id" } else { "not by id" });
            let mut values: Vec<&Json> = values.iter().collect();
            values.sort_by_key(|member| member.text_of("name").is_none());
            for (nth, inner) in values.into_iter().enumerate() {
                collect(field, &format!("{path}[{nth}]"), inner, out);
            }
        }
        Json::Array(values) => {
            for (nth, inner) in values.iter().enumerate() {
                collect(field, &format!("{path}[{nth}]"), inner, out);
            }
        }
    }
}

impl Json {
    /// The text of a member, without quotes.
    fn text_of(&self, name: &str) -> Option<&str> {
        let Json::Object(members) = self else { return None };
        members.iter().find_map(|(known, value)| match value {
            Json::Scalar(text) if known == name => Some(text.trim_matches('"')),
            _ => None,
        })
    }
}

impl Scanner<'_> {
    fn skip_space(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\r', '\n']).len();
    }

    /// Passes `token` and the white space before it.
    fn take(&mut self, token: char) -> Option<()> {
        self.skip_space();
        self.text[self.at..].starts_with(token).then(|| self.at += token.len_utf8())
    }

    fn value(&mut self) -> Option<Json> {
        self.skip_space();
        match self.text[self.at..].chars().next()? {
            '{' => {
                let member = |scanner: &mut Self| {
                    let name = scanner.string()?.trim_matches('"').to_owned();
                    scanner.take(':')?;
                    Some((name, scanner.value()?))
                };
                self.list('{', '}', member).map(Json::Object)
            }
            '[' => self.list('[', ']', Self::value).map(Json::Array),
            '"' => self.string().map(Json::Scalar),
            _ => {
                let rest = &self.text[self.at..];
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "+-.".contains(c)));
                let word = &rest[..end.unwrap_or(rest.len())];
                self.at += word.len();
                let is_number = word.starts_with(|c: char| c.is_ascii_digit() || c == '-');
                (is_number || ["true", "false", "null"].contains(&word)).then(|| Json::Scalar(word.into()))
            }
        }
    }

    fn list<T>(&mut self, open: char, close: char, one: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        self.take(open)?;
        let mut all = Vec::new();
        if self.take(close).is_some() {
            return Some(all);
        }
        loop {
            all.push(one(self)?);
            if self.take(close).is_some() {
                return Some(all);
            }
            self.take(',')?;
        }
    }

    /// With its quotes.
    fn string(&mut self) -> Option<String> {
        self.skip_space();
        let start = self.at;
        self.take('"')?;
        let mut escaped = false;
        for (offset, c) in self.text[self.at..].char_indices() {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => {
                    self.at += offset + 1;
                    return Some(self.text[start..self.at].into());
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_every_leaf_and_keeps_its_text() {
        let text = r#"{"header":{"revision":"3"}, "kvs":[{"key":"\u003ca"},{}],"more":true,"empty":[]}"#;
        let leaves = leaves(text).unwrap();
        let seen: Vec<_> =
            leaves.iter().map(|l| (l.field.as_str(), l.path.as_str(), l.text.as_str())).collect();
        assert_eq!(
            seen,
            [
                ("header.revision", "header.revision", "\"3\""),
                ("kvs.key", "kvs[0].key", "\"\\u003ca\""),
                ("kvs", "kvs[1]", "{}"),
                ("more", "more", "true"),
                ("empty", "empty", "[]"),
            ]
        );
    }

    #[test]
    fn bodies_are_split_into_documents_and_the_space_behind_them() {
        let body = b"{\"a\":\"}\\\"\"}\n{\"b\":[1,-2.5e3]} [] ";
        assert_eq!(split(body).unwrap(), ["{\"a\":\"}\\\"\"}", "{\"b\":[1,-2.5e3]}", "[]"]);
        assert_eq!(spaces(body), ["\n", " ", " "]);
        assert_eq!(split(b"").unwrap(), [""; 0]);
        for body in [b"Not Found\n".as_slice(), b"{\"a\":1", b"{a:1}", b"{\"a\" 1}", b"\xff", b"{} ,"] {
            assert!(split(body).is_none(), "{body:?}");
        }
    }

    #[test]
    fn members_have_one_order_and_their_own_is_noted() {
        let shown = |text: &str| leaves(text).unwrap().into_iter().map(|leaf| leaf.text).collect::<Vec<_>>();
        let (voter, learner) = (r#"{"ID":"9","name":"m0"}"#, r#"{"ID":"7"}"#);
        let one = shown(&format!("{{\"members\":[{learner},{voter}]}}"));
        assert_eq!(one, ["by id", "\"9\"", "\"m0\"", "\"7\""]);
        let other = shown(&format!("{{\"members\":[{voter},{learner}]}}"));
        assert_eq!(other, ["not by id", "\"9\"", "\"m0\"", "\"7\""]);
    }
}
