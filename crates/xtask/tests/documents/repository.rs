//! The files of the repository, and the paths by which documents name them.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::markdown::Document;

/// Endings of files that documents name without a folder.
const ENDINGS: [&str; 9] = [".rs", ".md", ".c", ".h", ".py", ".sh", ".toml", ".pc", ".txt"];

/// The files and folders of the repository, by their paths below its root.
pub(crate) struct Repository {
    root: PathBuf,
    files: BTreeSet<String>,
    folders: BTreeSet<String>,
    /// Every path without some of its first folders.
    suffixes: HashSet<String>,
}

impl Repository {
    /// Reads the names of all files, without the outputs of builds.
    pub(crate) fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = root.canonicalize().expect("the root of the repository");
        let (mut files, mut folders) = (BTreeSet::new(), BTreeSet::new());
        let mut pending = vec![root.clone()];
        while let Some(folder) = pending.pop() {
            for entry in fs::read_dir(&folder).expect("a folder can be read").flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let path = entry.path();
                let below = path.strip_prefix(&root).expect("below the root").to_string_lossy();
                match entry.file_type() {
                    Ok(kind) if kind.is_file() => _ = files.insert(below.into_owned()),
                    Ok(kind) if kind.is_dir() && !name.starts_with("target") && name != ".git" => {
                        folders.insert(below.into_owned());
                        pending.push(path);
                    }
                    _ => {}
                }
            }
        }
        let suffixes = files.iter().chain(&folders).flat_map(|path| {
            let starts = path.match_indices('/').map(|(at, _)| at + 1);
            std::iter::once(0).chain(starts).map(|start| path[start..].to_owned())
        });
        Self { suffixes: suffixes.collect(), root, files, folders }
    }

    /// The paths of all files.
    pub(crate) fn files(&self) -> &BTreeSet<String> {
        &self.files
    }

    /// The content of a text file.
    pub(crate) fn text(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// The content of a text file, or nothing if there is none.
    pub(crate) fn text_or_empty(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap_or_default()
    }

    /// Whether a code span is meant as a path of the repository.
    pub(crate) fn looks_like_a_path(&self, span: &str) -> bool {
        let is_plain = |char: char| char.is_ascii_alphanumeric() || "_-./*".contains(char);
        let is_relative = !span.starts_with(['/', '-', '.']) || span.starts_with(".ci/");
        if !is_relative || !span.chars().all(is_plain) || !span.contains(char::is_alphabetic) {
            return false;
        }
        let first = span.split('/').next().unwrap_or_default();
        let is_below_a_folder = span.contains('/')
            && (self.folders.contains(first) || self.folders.contains(&format!("crates/{first}")));
        is_below_a_folder
            || ENDINGS.iter().any(|ending| span.len() > ending.len() && span.ends_with(ending))
            || ["xeon-", "h200-"].iter().any(|machine| span.starts_with(machine))
    }

    /// Whether a file or folder has this path, or a longer one with this end. A crate's sources may
    /// be named without `crates/` and without `src/`.
    pub(crate) fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let mut parts = path.split('*');
        let (first, rest) = (parts.next().unwrap_or_default(), parts.collect::<Vec<_>>());
        let Some((last, middle)) = rest.split_last() else { return self.suffixes.contains(path) };
        self.suffixes.iter().any(|found| {
            let Some(mut left) = found.strip_prefix(first) else { return false };
            let is_in_order = middle.iter().all(|part| match left.split_once(part) {
                Some((_, behind)) => {
                    left = behind;
                    true
                }
                None => false,
            });
            is_in_order && left.ends_with(last)
        })
    }

    /// Checks the target of a relative link.
    pub(crate) fn follow(&self, document: &Document, link: &str) -> Result<(), String> {
        let (path, anchor) = link.split_once('#').map_or((link, None), |(a, b)| (a, Some(b)));
        let path = match path {
            "" => document.path.clone(),
            path => self.resolve(&document.path, path),
        };
        let path = path.trim_end_matches('/');
        if !self.files.contains(path) && !self.folders.contains(path) {
            return Err(format!("no file {path}"));
        }
        match anchor {
            Some(anchor) if !Document::read(self, path).has_anchor(self, anchor) => {
                Err(format!("{path} has no heading of that name"))
            }
            _ => Ok(()),
        }
    }

    /// The path below the root of a path that is relative to a document.
    pub(crate) fn resolve(&self, document: &str, relative: &str) -> String {
        let mut parts: Vec<&str> = document.split('/').collect();
        parts.pop();
        for part in relative.split('/') {
            match part {
                ".." => _ = parts.pop(),
                "." => {}
                part => parts.push(part),
            }
        }
        parts.join("/")
    }
}

/// The paths of a code span with lists in braces, such as `src/{ring,park}.rs`.
pub(crate) fn expand(span: &str) -> Vec<String> {
    let Some((before, rest)) = span.split_once('{') else { return vec![span.to_owned()] };
    let Some((list, after)) = rest.split_once('}') else { return vec![span.to_owned()] };
    let parts = list.split(',').map(|part| format!("{before}{}{after}", part.trim()));
    parts.flat_map(|path| expand(&path)).collect()
}
