//! Messages into and out of memory that is not resident: never touched, discarded, resident in
//! parts.

use memferry_message::plan::{PathKind, Pinning};
use memferry_message::{EndpointBuilder, ShareableBuffer, TAG_ALL};
use memferry_sys::Pages;
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_testing::message::{Pair, pair};
use memferry_testing::pattern::{fill, first_wrong};

/// Sizes that are no multiple of anything, from hardly worth a check to many steps.
const LENGTHS: [usize; 4] = [40_001, 100_003, 700_001, 5_000_011];
/// The offset of a message in its memory.
const SKEW: usize = 13;

/// Memory of either kind.
enum TestMemory {
    Ordinary(Pages),
    Shareable(ShareableBuffer),
}

impl TestMemory {
    fn new(shareable: bool, length: usize) -> Self {
        if shareable {
            Self::Shareable(ShareableBuffer::new(length + SKEW).unwrap())
        } else {
            Self::Ordinary(Pages::new(length + SKEW).unwrap())
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Ordinary(pages) => pages.as_mut_slice(),
            Self::Shareable(buffer) => buffer,
        }
    }

    /// Discards the pages; they read as zeroes afterwards.
    fn discard(&mut self) {
        let advice = match self {
            Self::Ordinary(_) => libc::MADV_DONTNEED,
            Self::Shareable(_) => libc::MADV_REMOVE,
        };
        let bytes = self.bytes();
        let length = bytes.len().next_multiple_of(page_bytes());
        // SAFETY: whole pages of a mapping that this value owns; zeroes are valid bytes.
        assert_eq!(unsafe { libc::madvise(bytes.as_mut_ptr().cast(), length, advice) }, 0);
        assert!(!residency::is_resident(self.bytes().as_ptr() as usize));
    }
}

/// The resident part of a target before its message arrives.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Residency {
    Nothing,
    NothingAgain,
    FrontHalf,
    BackHalf,
    EveryThirdPage,
    Everything,
}

const ALL: [Residency; 6] = [
    Residency::Nothing,
    Residency::NothingAgain,
    Residency::FrontHalf,
    Residency::BackHalf,
    Residency::EveryThirdPage,
    Residency::Everything,
];

impl Residency {
    fn prepare(self, memory: &mut TestMemory) {
        let bytes = memory.bytes();
        let half = bytes.len() / 2;
        match self {
            Self::Nothing => {}
            Self::NothingAgain => {
                bytes.fill(3);
                memory.discard();
            }
            Self::FrontHalf => bytes[..half].fill(3),
            Self::BackHalf => bytes[half..].fill(3),
            Self::EveryThirdPage => {
                bytes.iter_mut().step_by(3 * page_bytes()).for_each(|byte| *byte = 3);
            }
            Self::Everything => bytes.fill(3),
        }
    }
}

/// Sends the content of `source` and receives it into `target`, both at the offset.
fn send_and_check(sides: &Pair, source: &mut TestMemory, target: &mut TestMemory) {
    let (source, target) = (&source.bytes()[SKEW..], &mut target.bytes()[SKEW..]);
    // SAFETY: both are borrowed until the operations complete, which `finish` waits for.
    let (mut send, mut receive) = unsafe {
        let (from, to) = (source.as_ptr(), target.as_mut_ptr());
        (
            sides.here.isend_raw(sides.to_there, 1, from, source.len()).unwrap(),
            sides.there.irecv_raw(sides.to_here, 1, TAG_ALL, to, target.len()).unwrap(),
        )
    };
    sides.finish(&mut [&mut send, &mut receive]);
    send.wait().unwrap();
    receive.wait().unwrap();
}

fn check(path: PathKind, shareable: bool) {
    for pinning in Pinning::ALL {
        let sides = pair(&EndpointBuilder::new().path(path).pinning(pinning).eager_bytes(0));
        for (at, length) in LENGTHS.into_iter().enumerate() {
            let mut source = TestMemory::new(shareable, length);
            for (seed, there) in ALL.into_iter().enumerate() {
                let seed = (10 * at + seed) as u64;
                let case = format!("{path:?}, {pinning:?}, {length} bytes, {there:?}");
                fill(&mut source.bytes()[SKEW..], seed);
                let mut target = TestMemory::new(shareable, length);
                there.prepare(&mut target);
                send_and_check(&sides, &mut source, &mut target);
                assert_eq!(first_wrong(&target.bytes()[SKEW..], seed), None, "{case}");
                assert!(target.bytes()[..SKEW].iter().all(|&byte| byte == 0 || byte == 3));
            }
        }
    }
}

#[test]
fn a_receiver_alone_fills_memory_that_is_not_there() {
    check(PathKind::Single, false);
    check(PathKind::Single, true);
}

#[test]
fn both_sides_together_fill_memory_that_is_not_there() {
    check(PathKind::Cooperative, false);
    check(PathKind::Cooperative, true);
}

#[test]
fn engines_fill_memory_that_is_not_there() {
    check(PathKind::Offload, true);
}

#[test]
fn fragments_fill_memory_that_is_not_there() {
    check(PathKind::Pipeline, false);
    check(PathKind::Pipeline, true);
}

#[test]
fn the_same_target_can_be_discarded_between_messages() {
    let length = 1 << 20;
    for shareable in [false, true] {
        let sides = pair(&EndpointBuilder::new());
        let mut source = TestMemory::new(shareable, length);
        let mut target = TestMemory::new(shareable, length);
        for seed in 0..40 {
            fill(&mut source.bytes()[SKEW..], seed);
            if seed % 3 == 0 {
                target.discard();
            }
            send_and_check(&sides, &mut source, &mut target);
            assert_eq!(first_wrong(&target.bytes()[SKEW..], seed), None, "message {seed}");
        }
    }
}

#[test]
fn sources_that_are_not_there_arrive_as_the_zeroes_that_they_are() {
    for (path, shareable) in [
        (PathKind::Single, false),
        (PathKind::Cooperative, false),
        (PathKind::Cooperative, true),
        (PathKind::Offload, true),
        (PathKind::Pipeline, false),
    ] {
        for pinning in Pinning::ALL {
            let sides = pair(&EndpointBuilder::new().path(path).pinning(pinning));
            let mut source = TestMemory::new(shareable, 5_000_011);
            let mut target = TestMemory::new(shareable, 5_000_011);
            target.bytes().fill(3);
            source.bytes()[2_500_000] = 9;
            send_and_check(&sides, &mut source, &mut target);
            let bytes = &target.bytes()[SKEW..];
            assert_eq!(bytes[2_500_000 - SKEW], 9);
            assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 1, "{path:?}");
        }
    }
}

#[test]
fn no_page_beyond_a_short_message_is_brought_in() {
    let page = page_bytes();
    for path in [PathKind::Single, PathKind::Cooperative, PathKind::Pipeline] {
        let sides = pair(&EndpointBuilder::new().path(path).pinning(Pinning::On).eager_bytes(0));
        let mut target = Pages::new(4 << 20).unwrap();
        let message = vec![5u8; (1 << 20) + 1];
        let mut send = sides.here.isend(sides.to_there, 1, message).unwrap();
        // SAFETY: the target is not touched until the receive completes.
        let mut receive = unsafe {
            sides.there.irecv_raw(sides.to_here, 1, TAG_ALL, target.as_ptr(), target.len())
        }
        .unwrap();
        sides.finish(&mut [send.operation(), &mut receive]);
        assert_eq!(receive.wait().unwrap().length, (1 << 20) + 1);
        let there = residency::resident_pages(target.as_ptr() as usize, target.len()).unwrap();
        assert_eq!(there, (1 << 20) / page + 1, "{path:?}");
        assert!(target.as_mut_slice()[..=1 << 20].iter().all(|&byte| byte == 5));
    }
}

#[test]
fn the_policy_changes_between_messages_and_every_byte_arrives() {
    let sides = pair(&EndpointBuilder::new().pinning(Pinning::Auto).eager_bytes(0));
    assert_eq!(sides.there.pinning().unwrap(), Pinning::Auto);
    for (seed, pinning) in Pinning::ALL.into_iter().cycle().take(9).enumerate() {
        for side in [&sides.here, &sides.there] {
            side.set_pinning(pinning).unwrap();
            assert_eq!(side.pinning().unwrap(), pinning);
        }
        for shareable in [false, true] {
            let mut source = TestMemory::new(shareable, 700_001);
            let mut target = TestMemory::new(shareable, 700_001);
            fill(&mut source.bytes()[SKEW..], seed as u64);
            send_and_check(&sides, &mut source, &mut target);
            assert_eq!(first_wrong(&target.bytes()[SKEW..], seed as u64), None, "{pinning:?}");
        }
    }
}
