//! The fenced blocks of a page of documentation, so that a test runs what the page says.
//!
//! Owns: finding the blocks, and putting a test's own values in place of the page's. Must not know which page. Invariant: what is
//! replaced stands in the text as often as the test says, so that a changed page is noticed.

/// The blocks of `language`, in the page's order, without the indentation of their fence.
pub(crate) fn blocks(page: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}");
    let (mut found, mut inside) = (Vec::new(), None::<(usize, String)>);
    for line in page.lines() {
        let indentation = line.len() - line.trim_start().len();
        inside = match (line.trim(), inside.take()) {
            (text, None) if text == fence => Some((indentation, String::new())),
            ("```", Some((_, block))) => {
                found.push(block);
                None
            }
            (_, block) => block.map(|(fence, text)| (fence, text + &line[indentation.min(fence)..] + "\n")),
        };
    }
    found
}

/// The text with each of these replaced, which the page says once.
pub(crate) fn placed(text: &str, places: &[(&str, String)]) -> String {
    places.iter().fold(text.to_owned(), |text, (from, to)| {
        assert_eq!(text.matches(from).count(), 1, "the page says {from} once: {text}");
        text.replace(from, to)
    })
}

#[test]
fn blocks_are_found_and_changed() {
    let page = "a\n   ```toml\n   x = 1\n     y\n   ```\n```yaml\nz:\n  - 1\n```\n";
    assert_eq!(blocks(page, "toml"), ["x = 1\n  y\n"]);
    assert_eq!(blocks(page, "yaml"), ["z:\n  - 1\n"]);
    assert_eq!(placed("x = 1", &[("1", "2".to_owned())]), "x = 2");
}
