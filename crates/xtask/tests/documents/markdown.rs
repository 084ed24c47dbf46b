//! As much of Markdown as the documents use: fenced code, code spans, links, headings, includes.

use crate::repository::Repository;

/// A document, or a region of one, without its fenced code.
pub(crate) struct Document {
    /// The path below the root of the repository.
    pub(crate) path: String,
    lines: Vec<String>,
}

impl Document {
    /// The documents that are checked.
    pub(crate) fn all(repository: &Repository) -> Vec<Self> {
        let is_checked = |path: &&String| {
            let is_at_the_root = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];
            let is_of_a_crate = path.starts_with("crates/") && path.ends_with("/README.md");
            is_at_the_root.contains(&path.as_str())
                || is_of_a_crate
                || (path.starts_with("docs/") && path.ends_with(".md"))
        };
        let paths = repository.files().iter().filter(is_checked);
        paths.map(|path| Self::read(repository, path)).collect()
    }

    /// One document.
    pub(crate) fn read(repository: &Repository, path: &str) -> Self {
        let mut is_fenced = false;
        let mut lines = Vec::new();
        for line in repository.text(path).lines() {
            let is_fence = line.trim_start().starts_with("```");
            is_fenced ^= is_fence;
            if !is_fenced && !is_fence {
                lines.push(line.to_owned());
            }
        }
        Self { path: path.to_owned(), lines }
    }

    /// The text without fenced code.
    pub(crate) fn text(&self) -> String {
        self.lines.join("\n")
    }

    /// The contents of all code spans. A span may continue on the next line of its paragraph.
    pub(crate) fn code_spans(&self) -> Vec<String> {
        let text = self.text();
        let paragraphs = text.split("\n\n");
        paragraphs.flat_map(|text| text.split('`').skip(1).step_by(2).map(one_line)).collect()
    }

    /// The targets of all links and of all definitions of links, without addresses of the network.
    pub(crate) fn links(&self) -> Vec<String> {
        let mut links = self.inline_links();
        links.extend(self.definitions().map(|(_, target)| target.to_owned()));
        links.retain(|link| !link.contains("://"));
        links
    }

    /// The targets of links that are written in the text.
    pub(crate) fn inline_links(&self) -> Vec<String> {
        let text = self.without_code();
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        targets.map(|(target, _)| target.to_owned()).collect()
    }

    /// The keys of links by reference.
    pub(crate) fn references(&self) -> Vec<String> {
        let text = self.without_code();
        let keys = text.split("][").skip(1).filter_map(|rest| rest.split_once(']'));
        keys.map(|(key, _)| key.to_owned()).collect()
    }

    /// The keys of links by reference that the document does not define.
    pub(crate) fn undefined_references(&self) -> Vec<String> {
        self.references().into_iter().filter(|key| !self.defines(key)).collect()
    }

    /// Whether the document defines a link of this key.
    pub(crate) fn defines(&self, key: &str) -> bool {
        self.definitions().any(|(defined, _)| defined == key)
    }

    /// The regions of other documents that this page includes, with their paths.
    pub(crate) fn included(&self, repository: &Repository) -> Vec<(String, Self)> {
        let directives = self.lines.iter().filter_map(|line| line.strip_prefix("{{#include "));
        let targets = directives.filter_map(|rest| rest.strip_suffix("}}")?.split_once(':'));
        let region = |(path, name): (&str, &str)| {
            let path = repository.resolve(&self.path, path);
            let mut document = Self::read(repository, &path);
            let marks = ["ANCHOR", "ANCHOR_END"].map(|mark| format!("<!-- {mark}: {name} -->"));
            let position = |mark| document.lines.iter().position(|line| line == mark);
            let [start, end] = marks.each_ref().map(position);
            let (start, end) = start.zip(end).unwrap_or_else(|| panic!("{path} has no {name}"));
            document.lines = document.lines[start + 1..end].to_vec();
            (path, document)
        };
        targets.map(region).collect()
    }

    /// Whether the document, or what it includes, has a heading with this anchor.
    pub(crate) fn has_anchor(&self, repository: &Repository, anchor: &str) -> bool {
        let headings = self.lines.iter().filter(|line| line.starts_with('#'));
        headings.map(|line| anchor_of(line)).any(|found| found == anchor)
            || self.included(repository).iter().any(|(_, part)| part.has_anchor(repository, anchor))
    }

    fn definitions(&self) -> impl Iterator<Item = (&str, &str)> {
        self.lines.iter().filter_map(|line| line.strip_prefix('[')?.split_once("]: "))
    }

    fn without_code(&self) -> String {
        let text = self.text();
        let paragraphs = text.split("\n\n");
        let outside = |text: &str| text.split('`').step_by(2).collect::<Vec<_>>().join("code");
        paragraphs.map(outside).collect::<Vec<_>>().join("\n\n")
    }
}

/// The anchor that renderers give to a heading.
fn anchor_of(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|char| char.is_alphanumeric() || " -_".contains(*char));
    kept.map(|char| if char == ' ' { '-' } else { char }).collect()
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}
