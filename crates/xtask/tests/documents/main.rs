//! The documents name nothing that does not exist: paths, links, and names of the code.

mod markdown;
mod names;
mod repository;

use std::collections::BTreeSet;

use markdown::Document;
use repository::Repository;

/// Paths in documents that are no files of the repository, with the reason.
const OTHER_FILES: &[(&str, &str)] = &[
    ("adma.pc", "written by `cargo xtask install`"),
    ("crates/fuzz/kept/TARGET/", "a folder for each target"),
];

/// Names in documents that are no names of the code, with the reason.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("fi_av_remove", "a call of libfabric"),
    ("fi_close", "a call of libfabric"),
    ("fi_cntr_wait", "a call of libfabric"),
    ("fi_cq_sread", "a call of libfabric"),
    ("fi_trywait", "a call of libfabric"),
];

/// Fails with all findings at once.
fn expect_none(findings: &BTreeSet<String>) {
    let list: Vec<_> = findings.iter().map(String::as_str).collect();
    assert!(findings.is_empty(), "{} findings:\n{}", list.len(), list.join("\n"));
}

fn is_allowed(list: &[(&str, &str)], name: &str) -> bool {
    list.iter().any(|(allowed, _)| *allowed == name)
}

#[test]
fn every_path_in_a_document_exists() {
    let repository = Repository::read();
    let mut findings = BTreeSet::new();
    for document in Document::all(&repository) {
        for span in document.code_spans() {
            for path in repository::expand(&span) {
                if repository.looks_like_a_path(&path)
                    && !is_allowed(OTHER_FILES, &path)
                    && !repository.has(&path)
                {
                    findings.insert(format!("{}: no file {path}", document.path));
                }
            }
        }
    }
    expect_none(&findings);
}

#[test]
fn every_link_in_a_document_leads_somewhere() {
    let repository = Repository::read();
    let mut findings = BTreeSet::new();
    for document in Document::all(&repository) {
        for link in document.links() {
            if let Err(problem) = repository.follow(&document, &link) {
                findings.insert(format!("{}: {link}: {problem}", document.path));
            }
        }
        for key in document.undefined_references() {
            findings.insert(format!("{}: no definition of the link [{key}]", document.path));
        }
    }
    expect_none(&findings);
}

/// mdBook renders what is below `docs`, and nothing else.
#[test]
fn no_page_of_the_book_links_to_a_file_outside_of_it() {
    let repository = Repository::read();
    let mut findings = BTreeSet::new();
    for document in Document::all(&repository).iter().filter(|page| page.path.starts_with("docs/"))
    {
        let depth = document.path.matches('/').count() - 1;
        for link in document.links() {
            if link.matches("../").count() > depth {
                findings.insert(format!("{}: {link}", document.path));
            }
        }
        for (included, region) in document.included(&repository) {
            for link in region.inline_links() {
                findings.insert(format!("{included}: write [{link}] as a reference, for the book"));
            }
            for key in region.references() {
                if !document.defines(&key) {
                    findings
                        .insert(format!("{}: no definition of the link [{key}]", document.path));
                }
            }
        }
    }
    expect_none(&findings);
}

#[test]
fn every_page_is_in_the_summary_of_the_book() {
    let repository = Repository::read();
    let summary = Document::read(&repository, "docs/SUMMARY.md");
    let listed: BTreeSet<_> =
        summary.links().into_iter().map(|link| format!("docs/{link}")).collect();
    let pages = repository.files().iter().filter(|path| {
        path.starts_with("docs/") && path.ends_with(".md") && *path != "docs/SUMMARY.md"
    });
    expect_none(&pages.filter(|page| !listed.contains(*page)).cloned().collect());
}

#[test]
fn the_front_page_stays_short() {
    const MAX_LINES: usize = 180;
    let readme = include_str!("../../../../README.md");
    let lines = readme.lines().count();
    assert!(lines <= MAX_LINES, "README.md has {lines} lines: move something to docs/");
}

#[test]
fn every_name_of_the_code_in_a_document_occurs_in_the_code() {
    let repository = Repository::read();
    let words = names::words_of_the_code(&repository);
    let mut findings = BTreeSet::new();
    for document in Document::all(&repository) {
        for span in document.code_spans() {
            let is_design =
                document.path.starts_with("docs/design") || document.path == "ARCHITECTURE.md";
            for name in names::of_span(&span, is_design) {
                if !words.contains(&name) && !is_allowed(OTHER_NAMES, &name) {
                    findings.insert(format!("{}: no name {name}", document.path));
                }
            }
        }
    }
    expect_none(&findings);
}

#[test]
fn every_published_crate_has_a_readme_and_both_licences() {
    let repository = Repository::read();
    let mut findings = BTreeSet::new();
    for manifest in repository.files().iter().filter(|path| path.ends_with("/Cargo.toml")) {
        let text = repository.text(manifest);
        let folder = manifest.trim_end_matches("Cargo.toml");
        if text.contains("\npublish = false") || !folder.starts_with("crates/") {
            continue;
        }
        for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
            if repository.text_or_empty(&format!("{folder}{licence}")) != repository.text(licence) {
                findings.insert(format!("{folder}{licence} is not that of the repository"));
            }
        }
        if !text.contains("\nreadme = ") {
            findings.insert(format!("{manifest}: no readme"));
        }
    }
    expect_none(&findings);
}

#[test]
fn every_dependency_has_a_reason_in_contributing() {
    let repository = Repository::read();
    let is_manifest = |path: &&String| path.ends_with("Cargo.toml");
    let manifests = repository.files().iter().filter(is_manifest);
    let used: BTreeSet<_> =
        manifests.flat_map(|path| dependencies_of(&repository.text(path))).collect();
    let text = repository.text("CONTRIBUTING.md");
    let (_, section) = text.split_once("\n## Dependencies\n").expect("a section of dependencies");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    let listed: BTreeSet<_> = rows.map(|(name, _)| name.to_owned()).collect();
    let findings = used.symmetric_difference(&listed).map(|name| {
        let place = if used.contains(name) { "CONTRIBUTING.md" } else { "manifest" };
        format!("no {place} has the dependency {name}")
    });
    expect_none(&findings.collect());
}

/// The names of the dependencies of a manifest, without the crates of this repository.
fn dependencies_of(manifest: &str) -> Vec<String> {
    let sections = manifest.split("\n[").filter_map(|section| section.split_once("]\n"));
    let of_dependencies = sections.filter(|(title, _)| title.ends_with("dependencies"));
    let lines = of_dependencies.flat_map(|(_, lines)| lines.lines());
    let names = lines.filter_map(|line| line.split_once(['.', ' ']).map(|(name, _)| name));
    let is_other = |name: &&str| !name.starts_with('#') && !name.starts_with("memferry");
    names.filter(is_other).map(str::to_owned).collect()
}

#[test]
fn every_exception_is_still_needed() {
    let repository = Repository::read();
    let text: String = Document::all(&repository).iter().map(Document::text).collect();
    for (name, _) in OTHER_FILES.iter().chain(OTHER_NAMES) {
        assert!(text.contains(name), "no document names {name} any more: remove the exception");
    }
}
