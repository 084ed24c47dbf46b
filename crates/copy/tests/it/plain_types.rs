//! Copies of typed slices and buffers, and the calls that all handles share.

use std::error::Error as _;
use std::time::Duration;

use crate::common::{ferry, pattern};
use memferry_copy::{Options, Pod};

const TIMEOUT: Duration = Duration::from_secs(200);

/// A structure of a program.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Particle {
    position: [f64; 3],
    mass: f32,
    number: u32,
}

// SAFETY: a value of zero bytes is valid.
unsafe impl bytemuck::Zeroable for Particle {}
// SAFETY: plain numbers without padding; any bytes are valid.
unsafe impl Pod for Particle {}

fn particles(count: usize) -> Vec<Particle> {
    let particle = |n: usize| Particle { position: [n as f64; 3], mass: 0.5, number: n as u32 };
    (0..count).map(particle).collect()
}

#[test]
fn slices_of_any_plain_type_are_copied() {
    let ferry = ferry();
    for count in [0, 3, 1000, 200_000] {
        let source = particles(count);
        let mut target = vec![Particle::default(); count];
        ferry.copy(&source, &mut target).unwrap();
        assert!(source == target, "{count}");
        assert_eq!(ferry.compare(&source, &target), Ok(None));
        if count > 2 {
            target[2].mass = 7.0;
            assert_eq!(ferry.compare(&source, &target), Ok(Some(2)));
            ferry.copy_within(&mut target, 1..count, 0).unwrap();
            assert_eq!((target[0], target[1].mass), (source[1], 7.0));
        }
    }
    let units = [(); 5];
    ferry.copy(&units, &mut [(); 5]).unwrap();
    assert_eq!(ferry.compare(&units, &units), Ok(None));
}

#[test]
fn ranges_of_typed_slices_count_elements() {
    let (ferry, source) = (ferry(), particles(300_000));
    let mut target = vec![Particle::default(); source.len()];
    ferry
        .scope(|scope| {
            let transfer = scope.icopy(&source, &mut target)?;
            assert!(transfer.wait_range(1000..2000)? == &source[1000..2000]);
            assert!(transfer.wait_range(299_999..)? == &source[299_999..]);
            assert!(transfer.wait_range(..300_001).is_err());
            let ready = transfer.ready();
            assert!(ready == &source[..ready.len()]);
            transfer.wait()?;
            assert_eq!(transfer.ready().len(), source.len());
            transfer.wait()
        })
        .unwrap();
    assert!(source == target);
}

#[test]
fn an_owned_transfer_lends_what_has_arrived() {
    let ferry = ferry();
    for count in [5, 20_000, 4 << 20] {
        let source: Vec<u32> = (0..count).collect();
        let transfer = ferry.icopy(source, vec![0u32; count as usize]).unwrap();
        let middle = count as usize / 2;
        assert_eq!(transfer.wait_range(middle..=middle).unwrap(), [count / 2]);
        assert!(transfer.ready().iter().enumerate().all(|(at, &value)| at as u32 == value));
        let (source, target) = transfer.wait_timeout(TIMEOUT).unwrap().unwrap();
        assert!(source == target);
    }
}

#[test]
fn owned_buffers_of_two_types_need_the_same_number_of_bytes() {
    let ferry = ferry();
    let bytes: Box<[u8]> = pattern(4096, 1).into();
    let (bytes, words) = ferry.icopy(bytes, vec![0u64; 512]).unwrap().wait().unwrap();
    assert_eq!(bytemuck::cast_slice::<_, u8>(&words), &bytes[..]);
    let failed = ferry.icopy(words, vec![0u32; 512]).unwrap_err();
    assert_eq!((failed.source.len(), failed.target.len()), (512, 512));
}

#[test]
fn elements_without_bytes_are_a_copy_of_nothing_whatever_their_number() {
    let ferry = ferry();
    assert_eq!(ferry.copy(&[(); 3], &mut [(); 2]), Ok(()));
    assert_eq!(ferry.copy_with(&[(); 3], &mut [(); 2], Options::new()), Ok(()));
    assert_eq!(ferry.compare(&[(); 3], &[(); 2]), Ok(None));
    assert_eq!(ferry.copy_within(&mut [(); 3], 1.., 0), Ok(()));
    let transfer = ferry.icopy(vec![(); 3], vec![(); 2]).unwrap();
    assert_eq!((transfer.wait_range(..).unwrap().len(), transfer.ready().len()), (0, 0));
    let (source, target) = transfer.wait().unwrap();
    assert_eq!((source.len(), target.len()), (3, 2));
}

#[test]
fn a_failed_transfer_says_its_error_once() {
    let failed = ferry().icopy(vec![1u8; 3], vec![0u8; 4]).unwrap_err();
    assert_eq!(failed.to_string(), failed.error.to_string());
    assert!(failed.source().is_none(), "the text has the error, which has no cause");
    assert!(format!("{failed:?}").len() < 200);
}

#[test]
fn all_handles_are_checked_cancelled_and_signalled_alike() {
    let ferry = ferry();
    let (source, mut target) = (pattern(1 << 20, 2), vec![0u8; 1 << 20]);
    let owned = ferry.icopy(source.clone(), vec![0u8; 1 << 20]).unwrap();
    owned.event().unwrap();
    owned.transfer().wait().unwrap();
    assert_eq!((owned.check(), owned.is_done()), (Some(Ok(())), true));
    owned.cancel();
    assert!(owned.wait().is_ok());
    ferry.scope(|scope| {
        let scoped = scope.icopy(&source, &mut target).unwrap();
        scoped.event().unwrap();
        assert_eq!(scoped.wait_timeout(TIMEOUT), Some(Ok(())));
        scoped.cancel();
        assert_eq!((scoped.check(), scoped.is_done()), (Some(Ok(())), true));
        scoped.into_target().unwrap()[0] = 1;
    });
    assert!(target[0] == 1 && target[1..] == source[1..]);
}

#[test]
#[should_panic(expected = "the buffers were handed back")]
fn a_handle_whose_buffers_were_handed_back_lends_nothing() {
    let mut transfer = ferry().icopy(vec![1u8; 64], vec![0u8; 64]).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    drop(runtime.block_on(&mut transfer).unwrap());
    let _ = transfer.ready();
}
