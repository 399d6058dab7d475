//! How clearly the comments speak to a reader who has never seen the program: shares of pronouns, links that lead somewhere.
//!
//! Measured over `src` without test code. The bounds are near the figures of the best public network code in Rust; a figure past its bound
//! is reported with the places that cause it. Must not know: the meaning of any module.

use std::collections::{BTreeMap, BTreeSet};

use crate::report;
use crate::source::{product_files, read};

/// Words that point at a thing instead of naming it.
const PRONOUNS: &str = "it its that what who whoever whom whose which one ones there they them their those these such other others \
    this nobody somebody anybody everybody nothing something anything";
/// Words with which no comment begins: a clause in the place of a subject.
const OPENINGS: &str = "What Who Whoever Whose Whether Which Those Nobody Whom";
/// Share of pronouns in all words of comments, in per cent.
const MOST_PRONOUNS: f64 = 5.5;
/// Comments that begin with one of the [`OPENINGS`].
const MOST_OPENINGS: usize = 25;

/// The comments of a text: the line on which each begins, and its words.
fn comments(text: &str) -> Vec<(usize, String)> {
    let (mut comments, mut open) = (Vec::new(), None::<(usize, String)>);
    for (line, number) in text.lines().chain([""]).zip(1..) {
        match line.trim_start().strip_prefix("//") {
            Some(rest) => {
                let (_, words) = open.get_or_insert_with(|| (number, String::new()));
                *words += rest.trim_start_matches(['/', '!']);
                words.push(' ');
            }
            None => comments.extend(open.take()),
        }
    }
    comments
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphabetic() && c != '\'').filter(|word| !word.is_empty())
}

#[test]
fn comments_name_the_things_that_they_are_about() {
    let pronouns: BTreeSet<&str> = PRONOUNS.split_whitespace().collect();
    let openings: BTreeSet<&str> = OPENINGS.split_whitespace().collect();
    let (mut all, mut pointing, mut begins) = (0, 0, Vec::new());
    let mut shares = Vec::new();
    for source in product_files() {
        let (mut here, mut here_pointing) = (0, 0);
        for (line, comment) in comments(source.product()) {
            let first = words(&comment).next().unwrap_or_default();
            if openings.contains(first) {
                begins.push(format!("{}:{line}: {}", source.name, comment.trim()));
            }
            for word in words(&comment) {
                here += 1;
                here_pointing += usize::from(pronouns.contains(word.to_lowercase().as_str()));
            }
        }
        if here > 60 {
            shares.push((100 * here_pointing / here, source.name));
        }
        (all, pointing) = (all + here, pointing + here_pointing);
    }
    assert!(all > 10_000, "{all} words of comments");
    let share = 100.0 * pointing as f64 / all as f64;
    println!("{all} words of comments, {share:.1} % pronouns, {} openings", begins.len());
    shares.sort_unstable();
    let worst: Vec<_> = shares.iter().rev().take(10).collect();
    assert!(share <= MOST_PRONOUNS, "{share:.1} % of the words are pronouns, most in (per cent): {worst:?}");
    assert!(begins.len() <= MOST_OPENINGS, "{begins:#?}");
}

#[test]
fn comments_point_only_at_what_the_repository_holds() {
    let mut faults = Vec::new();
    let mut links = 0;
    let pages: BTreeMap<&str, String> =
        ["docs/decisions.md", "docs/etcd-facts.md", "docs/glossary.md"].map(|page| (page, read(page))).into();
    for source in product_files() {
        for (line, comment) in comments(source.product()) {
            let place = format!("{}:{line}", source.name);
            let numbered = |name: &str| {
                comment
                    .match_indices(name)
                    .any(|(at, _)| comment[at + name.len()..].starts_with(|c: char| c.is_ascii_digit()))
            };
            if ["rule ", "rules ", "Rule ", "story "].into_iter().any(numbered) {
                faults.push(format!("{place}: a rule or story that the repository does not hold"));
            }
            for (at, _) in comment.match_indices("docs/") {
                let link: String = comment[at..]
                    .chars()
                    .take_while(|c| c.is_alphanumeric() || "/.#-_".contains(*c))
                    .collect();
                let link = link.trim_end_matches('.');
                let (page, anchor) = link.split_once('#').unwrap_or((link, ""));
                links += 1;
                match pages.get(page) {
                    Some(_) if anchor.is_empty() => {}
                    Some(text) if text.contains(&format!("<a id=\"{anchor}\"></a>")) => {}
                    _ => faults.push(format!("{place}: {link} leads nowhere")),
                }
            }
        }
    }
    assert!(links > 20, "{links} links");
    report("comments point only at what the repository holds", &faults);
}
