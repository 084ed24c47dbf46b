//! Names of the code in documents.

use std::collections::HashSet;

use crate::repository::Repository;

/// The names in a code span that must occur in the code. Variables of the environment and constants
/// of the C calls are checked in all documents, names of types and functions in those about design.
pub(crate) fn of_span(span: &str, is_design: bool) -> Vec<String> {
    let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
    let words = span.split(|char| !is_name(char));
    let is_checked = |word: &&str| {
        let word = *word;
        let is_public =
            ["MEMFERRY_", "ADMA_E", "adma_"].iter().any(|start| word.starts_with(start));
        is_public || (is_design && (is_camel_case(word) || is_snake_case(word)))
    };
    words.filter(is_checked).map(str::to_owned).collect()
}

/// Two humps at least: one capital begins many words.
fn is_camel_case(word: &str) -> bool {
    let humps = word.chars().filter(char::is_ascii_uppercase).count();
    let has_lower = word.contains(|char: char| char.is_ascii_lowercase());
    word.starts_with(|char: char| char.is_ascii_uppercase()) && humps > 1 && has_lower
}

fn is_snake_case(word: &str) -> bool {
    word.contains('_')
        && !word.starts_with('_')
        && word
            .chars()
            .all(|char| char.is_ascii_lowercase() || char.is_ascii_digit() || char == '_')
}

/// All words of all sources below `crates`, without those of this test.
pub(crate) fn words_of_the_code(repository: &Repository) -> HashSet<String> {
    let is_source = |path: &&String| {
        let endings = [".rs", ".c", ".h", ".toml", ".py", ".sh", "/run"];
        path.starts_with("crates/")
            && !path.starts_with("crates/xtask/tests/documents/")
            && endings.iter().any(|ending| path.ends_with(ending))
    };
    let mut words = HashSet::new();
    for path in repository.files().iter().filter(is_source) {
        let text = repository.text(path);
        let found = text.split(|char: char| !(char.is_ascii_alphanumeric() || char == '_'));
        words.extend(found.map(str::to_owned));
    }
    // Files are named by their stems too.
    let stems = repository.files().iter().filter_map(|path| path.rsplit('/').next());
    words.extend(stems.filter_map(|name| name.split('.').next()).map(str::to_owned));
    words
}
