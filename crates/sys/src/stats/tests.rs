use proptest::prelude::*;

use super::kinds::{ALL, ChannelCounters, CopyPath, PeerCounters, ThreadCounters};
use super::layout::{BLOCKS_AT, DIRECTORY_AT, MAGIC, PAGE_BYTES, TEXT_AT, VERSION, entry, header};
use super::reader::{BlockView, FieldShape, PageError, PageView, parse, processes};
use super::{Block, CLASSES, class_of, thread};

/// Tests of the page of this process run one after another: one of them fills it.
fn one_at_a_time() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    crate::sync::lock(&TURN)
}

/// Creates the page of this process if no test has opened a block yet: some read their sums before they count.
fn open_page() {
    assert!(super::page::current().is_some(), "this process has a page");
}

fn own() -> Vec<BlockView> {
    let own = processes(Some(std::process::id())).unwrap();
    own.into_iter().next().expect("this process has a page").blocks
}

fn find(kind: &str, name: &str) -> Option<BlockView> {
    own().into_iter().find(|block| block.kind == kind && block.name == name)
}

/// Waits for a child and returns its status.
fn wait_for(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: waits for the child that the caller created.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

#[test]
fn classes_are_powers_of_two() {
    for (value, class) in [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (4096, 12), (8191, 12)] {
        assert_eq!(class_of(value), class, "{value}");
    }
    assert_eq!(class_of(u64::MAX), CLASSES - 1);
}

#[test]
fn a_reader_finds_what_was_counted() {
    let _turn = one_at_a_time();
    let block = Block::<PeerCounters>::open(7, "found-by-reader");
    block.count_sent(1, 5000);
    block.count_sent(1, 100);
    block.waits.add(3);
    let seen = find("peer", "found-by-reader").unwrap();
    assert_eq!((seen.id, seen.values("sent")[1], seen.sum("sent")), (Some(7), 2, 2));
    assert_eq!((seen.sum("sent_bytes"), seen.sum("waits"), seen.sum("received")), (5100, 3, 0));
    assert_eq!((seen.values("sent_sizes")[12], seen.values("sent_sizes")[6]), (1, 1));
    let labels = seen.fields.iter().find(|field| field.name == "fallbacks").unwrap();
    assert_eq!(labels.shape, FieldShape::Labels(vec!["refused".into()]));
}

#[test]
fn counters_of_a_block_that_is_gone_stay_in_the_sums() {
    let _turn = one_at_a_time();
    open_page();
    let sum = || own().iter().filter(|b| b.kind == "channel").map(|b| b.sum("bytes")).sum::<u64>();
    let before = sum();
    for _ in 0..3 {
        let block = Block::<ChannelCounters>::open(1, "soon gone");
        block.bytes.add(1000);
        block.depth.set(50);
    }
    assert_eq!(sum(), before + 3000);
    assert!(find("channel", "soon gone").is_none());
    let ended = find("channel", "ended").unwrap();
    assert_eq!((ended.id, ended.sum("depth")), (None, 0));
}

#[test]
fn threads_count_apart_and_together() {
    let _turn = one_at_a_time();
    open_page();
    let work = |copies: u64| {
        for _ in 0..copies {
            thread(|counters| counters.count_copy(CopyPath::Inline, 64));
        }
    };
    let sum =
        || own().iter().filter(|b| b.kind == "thread").map(|b| b.sum("copies_inline")).sum::<u64>();
    let before = sum();
    std::thread::scope(|scope| (1..=4).for_each(|n| drop(scope.spawn(move || work(n * 100)))));
    assert_eq!(sum(), before + 1000);
}

#[test]
fn blocks_of_threads_that_ended_make_room_and_stay_in_the_sums() {
    let _turn = one_at_a_time();
    open_page();
    const THREADS: u64 = 3000;
    let threads = || own().into_iter().filter(|b| b.kind == "thread").collect::<Vec<_>>();
    let sum = || threads().iter().map(|b| b.sum("faults")).sum::<u64>();
    let before = sum();
    for _ in 0..THREADS {
        let count = || thread(|counters| counters.faults.add(1));
        std::thread::Builder::new().spawn(count).unwrap().join().unwrap();
    }
    assert_eq!(sum(), before + THREADS);
    // Those of other tests, which are not many, and those that have ended since the last search.
    assert!(threads().len() < 300, "{}", threads().len());
}

#[test]
fn a_thread_that_lives_keeps_its_block_while_others_end() {
    let _turn = one_at_a_time();
    let (go_on, is_over) = std::sync::mpsc::channel::<()>();
    let (started, has_started) = std::sync::mpsc::channel();
    let name = "lives-on";
    let living = std::thread::Builder::new().name(name.into()).spawn(move || {
        thread(|counters| counters.sleeps.add(1));
        started.send(()).unwrap();
        is_over.recv().unwrap();
        thread(|counters| counters.sleeps.add(1));
        find("thread", name).unwrap().sum("sleeps")
    });
    has_started.recv().unwrap();
    for _ in 0..100 {
        std::thread::spawn(|| thread(|counters| counters.waits.add(1))).join().unwrap();
    }
    go_on.send(()).unwrap();
    assert_eq!(living.unwrap().join().unwrap(), 2);
}

#[test]
fn a_full_page_keeps_the_sums_of_the_first_block_that_ends() {
    let _turn = one_at_a_time();
    // SAFETY: the child, whose page is its own, opens blocks, reads `/proc` and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut blocks: Vec<_> =
            (0..).map_while(|n| Block::<PeerCounters>::try_open(n, "")).collect();
        blocks.iter().for_each(|block| block.waits.add(1));
        let count = blocks.len() as u64;
        blocks.truncate(blocks.len() / 2);
        let is_right = own().iter().map(|block| block.sum("waits")).sum::<u64>() == count;
        // SAFETY: ends the child without destructors of the parent's threads.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    assert_eq!(wait_for(child), 0, "the sums fell");
}

#[test]
fn a_block_without_a_place_counts_unseen() {
    let _turn = one_at_a_time();
    let blocks: Vec<_> =
        (0..2000).map(|n| Block::<ThreadCounters>::open(n, "one of many")).collect();
    blocks.iter().for_each(|block| block.faults.add(1));
    let placed = own().iter().filter(|block| block.name == "one of many").count();
    assert!(placed > 100 && placed < blocks.len(), "{placed}");
    let lost = processes(Some(std::process::id())).unwrap()[0].blocks_without_place;
    assert!(lost >= (blocks.len() - placed) as u64);
    drop(blocks);
    assert!(Block::<ThreadCounters>::try_open(1, "again").is_some());
}

#[test]
fn a_forked_child_counts_in_a_page_of_its_own() {
    let _turn = one_at_a_time();
    let block = Block::<PeerCounters>::open(1, "of the parent");
    thread(|counters| counters.waits.add(0));
    block.waits.add(5);
    // SAFETY: the child opens blocks, reads `/proc` and exits; the lock of the heap is released in it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        block.waits.add(100);
        let own_before = processes(Some(std::process::id())).unwrap().is_empty();
        let later = Block::<PeerCounters>::open(2, "of the child");
        later.waits.add(9);
        thread(|counters| counters.count_copy(CopyPath::Inline, 1));
        let seen = find("peer", "of the child").is_some_and(|seen| seen.sum("waits") == 9);
        let inline = own().iter().map(|block| block.sum("copies_inline")).sum::<u64>();
        let parent_is_absent = find("peer", "of the parent").is_none();
        drop(block);
        let is_right = own_before && seen && parent_is_absent && inline == 1;
        // SAFETY: ends the child without destructors of the parent's threads.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    assert_eq!(wait_for(child), 0, "the child used the page of its parent");
    assert_eq!(find("peer", "of the parent").unwrap().sum("waits"), 5);
    assert!(find("peer", "of the child").is_none());
}

#[test]
fn the_page_is_for_its_user_alone_and_cannot_be_shrunk() {
    use std::os::unix::fs::MetadataExt;
    let _block = Block::<PeerCounters>::open(1, "of a sealed page");
    let own = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok).find(|entry| {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        target.to_string_lossy().contains(super::PAGE_NAME)
    });
    let path = own.unwrap().path();
    let status = std::fs::metadata(&path).unwrap();
    assert_eq!((status.mode() & 0o777, status.len()), (0o600, PAGE_BYTES as u64));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    assert!(file.set_len(4096).is_err() && file.set_len(2 * PAGE_BYTES as u64).is_err());
}

/// A page as a process writes it, with two blocks.
fn page() -> Vec<u64> {
    let mut page = vec![0; PAGE_BYTES / 8];
    let text = super::layout::text_of(ALL);
    let words = text.as_bytes().chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    });
    words.enumerate().for_each(|(place, word)| page[TEXT_AT / 8 + place] = word);
    page[header::MAGIC] = MAGIC;
    page[header::VERSION] = VERSION;
    page[header::TEXT_AT] = TEXT_AT as u64;
    page[header::TEXT_BYTES] = text.len() as u64;
    page[header::DIRECTORY_AT] = DIRECTORY_AT as u64;
    page[header::ENTRIES] = 2;
    for number in 0..2 {
        let at = DIRECTORY_AT / 8 + number * entry::WORDS;
        page[at + entry::KIND] = (1 << 32) | 2;
        page[at + entry::AT] = (BLOCKS_AT + number * 4096) as u64;
        page[at + entry::WORDS_OF_BLOCK] = size_of::<ChannelCounters>() as u64 / 8;
        page[at + entry::NAME] = u64::from_ne_bytes(*b"cpu \x1b[2J");
    }
    page
}

#[test]
fn names_cannot_control_a_terminal() {
    let PageView { blocks, .. } = parse(&page()[..]).unwrap();
    assert_eq!(blocks.len(), 2);
    assert_eq!(blocks[0].name, "cpu ?[2J");
}

#[test]
fn an_older_reader_shows_what_it_knows_of_a_newer_page() {
    let mut page = page();
    let text = b"thread x:c\nchannel submitted:c novelty:z9 later:c\nnewer a:c\n       ";
    for (place, chunk) in text.chunks_exact(8).enumerate() {
        page[TEXT_AT / 8 + place] = u64::from_ne_bytes(chunk.try_into().unwrap());
    }
    page[header::TEXT_BYTES] = text.len() as u64 / 8 * 8;
    page[BLOCKS_AT / 8] = 11;
    let blocks = parse(&page[..]).unwrap().blocks;
    assert_eq!((blocks[0].sum("submitted"), blocks[0].fields.len()), (11, 1));
}

#[test]
fn what_is_no_page_is_refused_with_its_reason() {
    assert!(parse(&[][..]).is_err());
    assert_eq!(parse(&[0; 64][..]), Err(PageError("not a page of counters, or not written yet")));
    let mut newer = page();
    newer[header::VERSION] = 2;
    assert_eq!(parse(&newer[..]), Err(PageError("a page of another version of Memferry")));
    let mut outside = page();
    outside[header::DIRECTORY_AT] = u64::MAX - 7;
    assert_eq!(parse(&outside[..]), Err(PageError("a place outside the page")));
}

#[test]
fn a_page_cannot_make_a_reader_read_more_than_its_size() {
    let mut page = page();
    page[header::ENTRIES] = super::layout::MAX_BLOCKS as u64;
    for number in 0..super::layout::MAX_BLOCKS {
        let at = DIRECTORY_AT / 8 + number * entry::WORDS;
        page[at + entry::KIND] = 1;
        page[at + entry::AT] = 0;
        page[at + entry::WORDS_OF_BLOCK] = 4096;
    }
    let blocks = parse(&page[..]).unwrap().blocks;
    assert!(blocks.len() <= page.len() / 4096);
    page[header::ENTRIES] = u64::MAX;
    assert_eq!(parse(&page[..]), Err(PageError("the directory is longer than the page")));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_lying_page_is_read_without_harm(
        lies in proptest::collection::vec((0usize..PAGE_BYTES / 8, any::<u64>()), 0..64),
        header_lies in proptest::collection::vec((0usize..64, any::<u64>()), 0..4),
        entry_lies in proptest::collection::vec((0usize..64, any::<u64>()), 0..8),
        length in 0..=PAGE_BYTES / 8,
    ) {
        let mut page = page();
        lies.into_iter().chain(header_lies).for_each(|(place, lie)| page[place] = lie);
        entry_lies.into_iter().for_each(|(place, lie)| page[DIRECTORY_AT / 8 + place] = lie);
        page.truncate(length);
        if let Ok(view) = parse(&page[..]) {
            let values = view.blocks.iter().flat_map(|block| &block.fields);
            prop_assert!(values.map(|field| field.values.len()).sum::<usize>() <= length);
        }
    }
}
