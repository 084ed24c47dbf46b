//! Reading of pages, of this process and of others. A page may contain anything: every place and every length is
//! checked, and a page cannot make a reader read more than its own size.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io};

use super::PAGE_NAME;
use super::layout::{MAGIC, VERSION, entry, header};
use crate::shared_memory::{Mapping, Protection, SealedMemory};

/// The longest page that is read, in bytes.
const MAX_PAGE_BYTES: u64 = 8 << 20;
const MAX_TEXT_BYTES: usize = 16 << 10;
const MAX_ENTRIES: usize = 8192;
const MAX_FIELD_WORDS: usize = 64;
/// The most descriptors of one process that are searched for a page.
const MAX_DESCRIPTORS: usize = 65_536;
/// The most pages of one process: one for each copy of the library in it.
const MAX_PAGES: usize = 16;

/// A process with its counters.
#[derive(Debug, Clone)]
pub struct ProcessView {
    /// The process, as this one numbers it.
    pub pid: u32,
    /// The name of its program.
    pub name: String,
    /// The number of blocks that found no place in its pages.
    pub blocks_without_place: u64,
    /// The blocks of all its pages.
    pub blocks: Vec<BlockView>,
}

/// A page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageView {
    /// When the process started, as in `/proc/PID/stat`.
    pub start_ticks: u64,
    /// The name of its program.
    pub name: String,
    /// The number of blocks that found no place.
    pub blocks_without_place: u64,
    /// The blocks.
    pub blocks: Vec<BlockView>,
}

/// A block of counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockView {
    /// The kind, such as `channel`.
    pub kind: String,
    /// The number of what it counts for; `None` for the sums of blocks that are gone.
    pub id: Option<u64>,
    /// Its name.
    pub name: String,
    /// The fields.
    pub fields: Vec<FieldView>,
}

/// A field of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldView {
    /// Its name.
    pub name: String,
    /// What its values are.
    pub shape: FieldShape,
    /// The values.
    pub values: Vec<u64>,
}

/// What the values of a field are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FieldShape {
    /// One counter.
    Counter,
    /// One value that also falls.
    Gauge,
    /// A histogram of bytes: a count for each power of two.
    Sizes(usize),
    /// A histogram of nanoseconds.
    Nanoseconds(usize),
    /// A counter for each label.
    Labels(Vec<String>),
}

impl FieldShape {
    fn words(&self) -> usize {
        match self {
            Self::Counter | Self::Gauge => 1,
            Self::Sizes(words) | Self::Nanoseconds(words) => *words,
            Self::Labels(labels) => labels.len(),
        }
    }
}

impl BlockView {
    /// The values of a field; empty if the block does not have it.
    pub fn values(&self, name: &str) -> &[u64] {
        let field = self.fields.iter().find(|field| field.name == name);
        field.map_or(&[], |field| &field.values)
    }

    /// The sum of the values of a field.
    pub fn sum(&self, name: &str) -> u64 {
        self.values(name).iter().fold(0, |sum, value| sum.wrapping_add(*value))
    }
}

/// Why a page cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageError(pub &'static str);

impl std::fmt::Display for PageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for PageError {}

/// The words of a page: in memory of this process, or in a mapping that another one changes.
pub trait Words {
    /// A word; `None` behind the end.
    fn word(&self, index: usize) -> Option<u64>;
    /// The number of words.
    fn count(&self) -> usize;
}

impl Words for [u64] {
    fn word(&self, index: usize) -> Option<u64> {
        self.get(index).copied()
    }

    fn count(&self) -> usize {
        self.len()
    }
}

impl Words for Mapping {
    fn word(&self, index: usize) -> Option<u64> {
        if index >= self.count() {
            return None;
        }
        // SAFETY: the word lies inside the mapping, which starts at a page, and whose memory cannot be shrunk.
        let word = unsafe { &*self.as_ptr().cast::<AtomicU64>().add(index) };
        Some(word.load(Ordering::Acquire))
    }

    fn count(&self) -> usize {
        self.len() / 8
    }
}

struct KindText {
    name: String,
    fields: Vec<(String, FieldShape)>,
}

/// Reads a page.
pub fn parse(page: &(impl Words + ?Sized)) -> Result<PageView, PageError> {
    let word = |index: usize| page.word(index).ok_or(PageError("the page is too short"));
    if word(header::MAGIC)? != MAGIC {
        return Err(PageError("not a page of counters, or not written yet"));
    }
    if word(header::VERSION)? != VERSION {
        return Err(PageError("a page of another version of Memferry"));
    }
    let text_bytes = word(header::TEXT_BYTES)?.min(MAX_TEXT_BYTES as u64) as usize;
    let kinds = parse_kinds(&text(page, word(header::TEXT_AT)?, text_bytes)?);
    let directory = index_of(page, word(header::DIRECTORY_AT)?)?;
    let entries = word(header::ENTRIES)?.min(MAX_ENTRIES as u64) as usize;
    // Blocks do not overlap, so all of them are at most the page.
    let mut budget = page.count();
    let mut blocks = Vec::new();
    for number in 0..entries {
        let at = directory + number * entry::WORDS;
        if at + entry::WORDS > page.count() {
            return Err(PageError("the directory is longer than the page"));
        }
        if let Some(block) = parse_block(page, at, &kinds, &mut budget) {
            blocks.push(block);
        }
    }
    Ok(PageView {
        start_ticks: word(header::START_TICKS)?,
        name: text(page, header::NAME as u64 * 8, header::NAME_WORDS * 8)?,
        blocks_without_place: word(header::BLOCKS_WITHOUT_PLACE)?,
        blocks,
    })
}

/// Reads the block of an entry; `None` if the entry is free, changes meanwhile, or makes no sense.
fn parse_block(
    page: &(impl Words + ?Sized),
    at: usize,
    kinds: &[KindText],
    budget: &mut usize,
) -> Option<BlockView> {
    let use_and_kind = page.word(at + entry::KIND)?;
    let kind = kinds.get((use_and_kind as u32 as usize).checked_sub(1)?)?;
    let start = index_of(page, page.word(at + entry::AT)?).ok()?;
    let words = usize::try_from(page.word(at + entry::WORDS_OF_BLOCK)?).ok()?;
    *budget = budget.checked_sub(words)?;
    let id = page.word(at + entry::ID)?;
    let name = text(page, (at + entry::NAME) as u64 * 8, entry::NAME_WORDS * 8).ok()?;
    let (mut fields, mut next) = (Vec::new(), start);
    for (name, shape) in &kind.fields {
        let end = next.checked_add(shape.words())?;
        if end > start.checked_add(words)? {
            break;
        }
        let values = (next..end).map(|index| page.word(index)).collect::<Option<Vec<u64>>>()?;
        fields.push(FieldView { name: name.clone(), shape: shape.clone(), values });
        next = end;
    }
    if page.word(at + entry::KIND)? != use_and_kind {
        return None;
    }
    let id = (id != entry::ENDED).then_some(id);
    Some(BlockView { kind: kind.name.clone(), id, name, fields })
}

fn index_of(page: &(impl Words + ?Sized), at: u64) -> Result<usize, PageError> {
    let index = usize::try_from(at / 8).unwrap_or(usize::MAX);
    if !at.is_multiple_of(8) || index >= page.count() {
        return Err(PageError("a place outside the page"));
    }
    Ok(index)
}

/// Text of a page, up to its first zero byte, without what controls a terminal.
fn text(page: &(impl Words + ?Sized), at: u64, bytes: usize) -> Result<String, PageError> {
    let first = index_of(page, at)?;
    let words =
        (first..first.saturating_add(bytes.div_ceil(8))).map_while(|index| page.word(index));
    let mut text: Vec<u8> = words.flat_map(u64::to_ne_bytes).take(bytes).collect();
    text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(text.len()));
    let clean = |c: char| if c.is_control() && c != '\n' { '?' } else { c };
    Ok(String::from_utf8_lossy(&text).chars().map(clean).collect())
}

fn parse_kinds(text: &str) -> Vec<KindText> {
    let kind = |line: &str| {
        let mut words = line.split(' ');
        let name = words.next().unwrap_or_default().to_owned();
        KindText { name, fields: words.map_while(parse_field).collect() }
    };
    text.lines().map(kind).collect()
}

/// Reads a field. Behind one of an unknown shape, the places of others are not known.
fn parse_field(text: &str) -> Option<(String, FieldShape)> {
    let (name, shape) = text.split_once(':')?;
    let words = |text: &str| text.parse().ok().filter(|words| *words <= MAX_FIELD_WORDS);
    let shape = match shape.split_at_checked(1)? {
        ("c", "") => FieldShape::Counter,
        ("g", "") => FieldShape::Gauge,
        ("b", count) => FieldShape::Sizes(words(count)?),
        ("n", count) => FieldShape::Nanoseconds(words(count)?),
        ("l", labels) => {
            let labels: Vec<String> =
                labels.strip_prefix('=')?.split('|').map(str::to_owned).collect();
            FieldShape::Labels(Some(labels).filter(|labels| labels.len() <= MAX_FIELD_WORDS)?)
        }
        _ => return None,
    };
    Some((name.to_owned(), shape))
}

/// When a process started, in ticks since the start of the machine. `process` is a number or `self`.
pub(super) fn start_ticks(process: &str) -> Option<u64> {
    const FIELD: usize = 22;
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program is in parentheses, and may contain spaces and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(FIELD - 3)?.parse().ok()
}

/// The processes of this machine with counters that this process may read, in the order of their numbers; `only`
/// restricts them to one.
pub fn processes(only: Option<u32>) -> io::Result<Vec<ProcessView>> {
    let mut pids: Vec<u32> = match only {
        Some(pid) => vec![pid],
        None => fs::read_dir("/proc")?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect(),
    };
    pids.sort_unstable();
    Ok(pids.into_iter().filter_map(process).collect())
}

/// A process with its counters; `None` if it has none, has ended, or belongs to another user.
fn process(pid: u32) -> Option<ProcessView> {
    let start_ticks = start_ticks(&pid.to_string())?;
    let mut found: HashMap<(u64, u64), PageView> = HashMap::new();
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    for descriptor in descriptors.take(MAX_DESCRIPTORS).filter_map(Result::ok) {
        let path = descriptor.path();
        let is_page = fs::read_link(&path).is_ok_and(|target| is_page_link(&target));
        if !is_page || found.len() == MAX_PAGES {
            continue;
        }
        let Ok((file, page)) = open(&path) else { continue };
        // A page that was inherited, or passed on, is that of another process.
        if let Some(view) = parse(&page).ok().filter(|view| view.start_ticks == start_ticks) {
            found.insert(file, view);
        }
    }
    let mut pages = found.into_values();
    let PageView { name, blocks_without_place, blocks, .. } = pages.next()?;
    let first = ProcessView { pid, name, blocks_without_place, blocks };
    Some(pages.fold(first, |mut all, page| {
        all.blocks.extend(page.blocks);
        all.blocks_without_place = all.blocks_without_place.wrapping_add(page.blocks_without_place);
        all
    }))
}

fn is_page_link(target: &std::path::Path) -> bool {
    target
        .to_str()
        .and_then(|target| target.strip_prefix("/memfd:"))
        .is_some_and(|rest| rest.strip_suffix(" (deleted)").unwrap_or(rest) == PAGE_NAME)
}

/// Maps a page for reading, and returns which file it is.
fn open(path: &std::path::Path) -> io::Result<((u64, u64), Mapping)> {
    use rustix::fs::{Mode, OFlags};
    // The link may lead to something else by now, even to a pipe that blocks.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let descriptor: OwnedFd = rustix::fs::open(path, flags, Mode::empty())?;
    let status = rustix::fs::fstat(&descriptor)?;
    let length = u64::try_from(status.st_size).unwrap_or(0).min(MAX_PAGE_BYTES + 1);
    if length > MAX_PAGE_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let memory = SealedMemory::from_untrusted_fd(descriptor, length as usize)?;
    Ok(((status.st_dev, status.st_ino), memory.map(Protection::ReadOnly)?))
}
