//! Loads to host memory and to a model of a GPU: every byte is compared.

use std::path::Path;

use crate::common::{bytes_of, model_gpu, tensors_of, write_tensors};
use memferry::engine::MemoryKind;
use memferry::engine::testing::cuda_model::CudaFaults;
use memferry::load::{
    FileSource, LoadError, Loader, Placement, ReadMode, SafetensorsFile, ShardedFiles,
};
use memferry::{Buffer, Ferry};
use memferry_testing::HangGuard;

const MIB: usize = 1 << 20;

fn host_loader(mode: ReadMode) -> Loader {
    Loader::builder().threads(2).read_mode(mode).build(Ferry::new().unwrap()).unwrap()
}

#[test]
fn every_byte_of_a_file_arrives_in_host_memory() {
    let _guard = HangGuard::new("every byte of a file arrives in host memory");
    let folder = tempfile::tempdir().unwrap();
    let tensors = tensors_of(&[8192, 5 * MIB + 3, 0, 17, 9 * MIB]);
    let path = write_tensors(&folder.path().join("a.safetensors"), &tensors);
    let expected: Vec<u8> = tensors.iter().flat_map(|tensor| tensor.data.clone()).collect();
    let file = SafetensorsFile::open(&path).unwrap();
    let (buffer, report) = host_loader(ReadMode::Auto).load_to_host(file).unwrap();
    assert!(buffer[..] == expected[..]);
    assert_eq!(report.bytes, expected.len() as u64);
    assert_eq!(report.cached_bytes + report.buffered_bytes, report.bytes);
    assert_eq!((report.threads, report.staging_bytes), (2, 0));
}

#[test]
fn every_byte_of_a_file_arrives_on_a_device_in_each_mode() {
    let _guard = HangGuard::new("every byte of a file arrives on a device in each mode");
    let folder = tempfile::tempdir().unwrap();
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let tensors = tensors_of(&[8192, 5 * MIB + 3, 0, 17, 9 * MIB]);
    for place in [folder.path(), shm.path()] {
        let path = write_tensors(&place.join("a.safetensors"), &tensors);
        for mode in [ReadMode::Auto, ReadMode::Cached, ReadMode::Direct] {
            let gpu = model_gpu(CudaFaults::default());
            let loader = Loader::builder().threads(3).read_mode(mode);
            let loader = loader.build(gpu.loader.ferry().clone()).unwrap();
            let (loaded, report) =
                gpu.load_by(&loader, SafetensorsFile::open(&path).unwrap()).unwrap();
            for tensor in &tensors {
                let (info, address) = loaded.get(&tensor.name).unwrap();
                assert_eq!(info.shape, [tensor.data.len()]);
                assert!(gpu.model.read(address, info.len()) == tensor.data, "{}", tensor.name);
            }
            let read = report.cached_bytes + report.direct_bytes + report.buffered_bytes;
            assert_eq!(read, report.bytes, "{mode:?} in {}", place.display());
            assert!(report.staging_bytes > 0 && report.staging_bytes <= 512 * MIB);
        }
    }
}

#[test]
fn a_file_that_is_not_in_the_page_cache_is_read_past_it() {
    let _guard = HangGuard::new("a file that is not in the page cache is read past it");
    // The file system of the sources; that of /tmp may be a tmpfs, which is all page cache.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let tensors = tensors_of(&[9 * MIB + 5]);
    let path = write_tensors(&folder.path().join("a.safetensors"), &tensors);
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();

    let gpu = model_gpu(CudaFaults::default());
    let (loaded, report) = gpu.load(SafetensorsFile::open(&path).unwrap()).unwrap();
    let (info, address) = loaded.get("layer.0.weight").unwrap();
    assert!(gpu.model.read(address, info.len()) == tensors[0].data);
    let read = report.cached_bytes + report.direct_bytes + report.buffered_bytes;
    assert_eq!(read, report.bytes);
    let can_bypass = {
        use std::os::unix::fs::OpenOptionsExt;
        let flag = rustix::fs::OFlags::DIRECT.bits() as i32;
        std::fs::OpenOptions::new().read(true).custom_flags(flag).open(&path).is_ok()
    };
    if can_bypass {
        assert!(report.direct_bytes > 0, "{report:?}");
    }
}

#[test]
fn the_staging_buffers_are_used_again_and_are_freed_with_the_loader() {
    let _guard = HangGuard::new("the staging buffers are used again and are freed with the loader");
    let folder = tempfile::tempdir().unwrap();
    let path = write_tensors(&folder.path().join("a.safetensors"), &tensors_of(&[5 * MIB]));
    let gpu = model_gpu(CudaFaults::default());
    let before = gpu.model.registered();
    for _ in 0..3 {
        gpu.load(SafetensorsFile::open(&path).unwrap()).unwrap();
        assert_eq!(gpu.model.registered().len(), before.len() + 1);
    }
    let (model, _ferry) = (gpu.model.clone(), gpu.loader.ferry().clone());
    drop(gpu);
    assert_eq!(model.registered(), before);
}

#[test]
fn loads_at_the_same_time_do_not_share_buffers() {
    let _guard = HangGuard::new("loads at the same time do not share buffers");
    let folder = tempfile::tempdir().unwrap();
    let gpu = model_gpu(CudaFaults::default());
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (gpu, folder) = (&gpu, folder.path());
            scope.spawn(move || {
                let data = bytes_of(seed + 50, 9 * MIB);
                let tensor = crate::common::NamedBytes { name: "t".into(), data: data.clone() };
                let path = write_tensors(&folder.join(format!("{seed}.safetensors")), &[tensor]);
                for _ in 0..3 {
                    let file = SafetensorsFile::open(&path).unwrap();
                    let (loaded, _) = gpu.load(file).unwrap();
                    let (info, address) = loaded.get("t").unwrap();
                    assert!(gpu.model.read(address, info.len()) == data);
                }
            });
        }
    });
}

#[test]
fn a_lost_device_ends_the_load_with_an_error_and_leaves_nothing() {
    let _guard = HangGuard::new("a lost device ends the load with an error and leaves nothing");
    let folder = tempfile::tempdir().unwrap();
    let path = write_tensors(&folder.path().join("a.safetensors"), &tensors_of(&[40 * MIB]));
    let gpu = model_gpu(CudaFaults { lost_at_copy: Some(3), ..CudaFaults::default() });
    let outcome = gpu.load(SafetensorsFile::open(&path).unwrap());
    assert!(matches!(outcome, Err(LoadError::Copy(_))), "{outcome:?}");
}

#[test]
fn a_file_that_is_truncated_during_the_load_is_an_error() {
    let _guard = HangGuard::new("a file that is truncated during the load is an error");
    let folder = tempfile::tempdir().unwrap();
    let path = write_tensors(&folder.path().join("a.safetensors"), &tensors_of(&[9 * MIB]));
    let gpu = model_gpu(CudaFaults::default());
    let file = SafetensorsFile::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB as u64).unwrap();
    let outcome = gpu.load(file);
    assert!(matches!(outcome, Err(LoadError::Truncated { .. })), "{outcome:?}");

    let path = write_tensors(&folder.path().join("b.safetensors"), &tensors_of(&[9 * MIB]));
    let file = SafetensorsFile::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB as u64).unwrap();
    let outcome = host_loader(ReadMode::Auto).load_to_host(file);
    assert!(matches!(outcome, Err(LoadError::Truncated { .. })), "{outcome:?}");
}

#[test]
fn a_cancelled_load_says_so_and_a_dropped_one_waits_for_its_threads() {
    let _guard = HangGuard::new("a cancelled load says so and a dropped one waits for its threads");
    let folder = tempfile::tempdir().unwrap();
    let path = write_tensors(&folder.path().join("a.safetensors"), &tensors_of(&[64 * MIB]));
    let mut target = Buffer::new(64 * MIB).unwrap();
    let loader = host_loader(ReadMode::Auto);
    for is_dropped in [false, true] {
        let file = FileSource::open(&path).unwrap();
        let start = file.len() - (64 * MIB) as u64;
        let placement = Placement::new(0, start, target.as_mut_ptr(), 64 * MIB);
        // SAFETY: the buffer has this length and outlives the load, which ends below.
        let loading =
            unsafe { loader.start_raw(vec![file], &[placement], MemoryKind::Host) }.unwrap();
        loading.cancel();
        if is_dropped {
            drop(loading);
        } else if let Err(error) = loading.wait() {
            assert!(matches!(error, LoadError::Cancelled));
        }
    }
    // Nobody writes to it any more.
    target.fill(0);
    assert!(target.iter().all(|&byte| byte == 0));
}

#[test]
fn an_index_loads_the_tensors_of_several_files() {
    let _guard = HangGuard::new("an index loads the tensors of several files");
    let folder = tempfile::tempdir().unwrap();
    let tensors = tensors_of(&[1000, 5 * MIB, 77]);
    write_tensors(&folder.path().join("one.safetensors"), &tensors[..1]);
    write_tensors(&folder.path().join("two.safetensors"), &tensors[1..]);
    let index = folder.path().join("model.safetensors.index.json");
    std::fs::write(
        &index,
        r#"{"weight_map": {"layer.0.weight": "one.safetensors", "layer.2.weight": "two.safetensors"}}"#,
    )
    .unwrap();
    let files = ShardedFiles::open(&index).unwrap();
    let named: Vec<_> = files.tensors().map(|(file, tensor)| (file, &*tensor.name)).collect();
    assert_eq!(named, [(0, "layer.0.weight"), (1, "layer.2.weight")]);
    let mut targets = [vec![0u8; 1000], vec![0u8; 77]];
    let placements: Vec<_> = files
        .tensors()
        .zip(&mut targets)
        .map(|((file, t), target)| {
            Placement::new(file, t.bytes.start, target.as_mut_ptr(), target.len())
        })
        .collect();
    let loader = host_loader(ReadMode::Auto);
    // SAFETY: the targets have these lengths and live until the load has ended.
    let loading =
        unsafe { loader.start_raw(files.into_sources(), &placements, MemoryKind::Host) }.unwrap();
    loading.wait().unwrap();
    assert!(targets[0] == tensors[0].data && targets[1] == tensors[2].data);
}

#[test]
fn an_index_that_lies_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_tensors(&folder.path().join("one.safetensors"), &tensors_of(&[10]));
    let refused = |text: &str| {
        let index = folder.path().join("index.json");
        std::fs::write(&index, text).unwrap();
        ShardedFiles::open(&index).unwrap_err().to_string()
    };
    assert!(refused("{").contains("index.json is not a valid index"));
    assert!(refused("{}").contains("no object `weight_map`"));
    assert!(refused(r#"{"weight_map": {"a": 5}}"#).contains("the file of a is not a text"));
    let outside = refused(r#"{"weight_map": {"a": "../one.safetensors"}}"#);
    assert!(outside.contains("not the name of a file beside the index"), "{outside}");
    let missing = refused(r#"{"weight_map": {"a": "one.safetensors"}}"#);
    assert!(missing.contains("one.safetensors has no tensor a"), "{missing}");
    assert!(refused(r#"{"weight_map": {"a": "none"}}"#).contains("none cannot be opened"));
    assert!(matches!(ShardedFiles::open(Path::new("nowhere")), Err(LoadError::Open { .. })));
}
