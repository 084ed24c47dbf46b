//! Files whose header is wrong are refused with a reason, and nothing of them is loaded.

use crate::common::{tensors_of, write_file, write_tensors};
use memferry::load::{LoadError, SafetensorsFile, ShardedFiles};
use memferry_testing::HangGuard;

/// The reason why a file with this header and this much data is refused.
fn reason(header: &str, data_bytes: usize) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.safetensors");
    write_file(&path, header, &vec![0; data_bytes]);
    match SafetensorsFile::open(&path) {
        Err(LoadError::InvalidFile { reason, .. }) => reason,
        other => panic!("{header} with {data_bytes} bytes: {other:?}"),
    }
}

#[test]
fn a_header_that_is_no_json_is_refused() {
    assert!(reason("{", 0).contains("its header is wrong"));
    assert!(reason("\u{1}", 0).contains("its header is wrong"));
}

#[test]
fn a_header_that_claims_more_than_the_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.safetensors");
    for length in [u64::MAX, 1 << 40, 200_000_000, 9] {
        std::fs::write(&path, [&length.to_le_bytes()[..], b"{}"].concat()).unwrap();
        let error = SafetensorsFile::open(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("claims {length} bytes")), "{error}");
    }
}

#[test]
fn a_file_that_is_too_short_for_a_header_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.safetensors");
    std::fs::write(&path, b"1234567").unwrap();
    let error = SafetensorsFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("it has 7 bytes"), "{error}");
}

#[test]
fn tensors_that_overlap_or_leave_a_gap_are_refused() {
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},
                "b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    assert!(reason(&two("[0,4]", "[2,6]"), 6).contains("its header is wrong"));
    assert!(reason(&two("[0,4]", "[5,9]"), 9).contains("its header is wrong"));
    assert!(reason(&two("[0,4]", "[8,4]"), 8).contains("its header is wrong"));
}

#[test]
fn a_tensor_with_another_length_than_its_shape_is_refused() {
    let header = |shape: &str, end: u64| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
    };
    assert!(reason(&header("[3]", 8), 8).contains("its header is wrong"));
    let overflow = format!("[{0},{0},{0}]", u64::MAX / 2);
    assert!(reason(&header(&overflow, 8), 8).contains("its header is wrong"));
}

#[test]
fn a_type_that_does_not_exist_is_refused() {
    let header = r#"{"a":{"dtype":"F7","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(reason(header, 1).contains("its header is wrong"));
}

#[test]
fn a_file_with_too_few_or_too_many_bytes_is_refused() {
    let header = r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#;
    assert!(reason(header, 7).contains("tensors have 8 bytes, the file has 7"));
    assert!(reason(header, 9).contains("tensors have 8 bytes, the file has 9"));
}

#[test]
fn a_folder_is_not_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let refused = SafetensorsFile::open(folder.path());
    assert!(matches!(refused, Err(LoadError::Open { .. })), "{refused:?}");
}

#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let _guard = HangGuard::new("opening a pipe");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mkfifo = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(mkfifo.success());
    let refused = [SafetensorsFile::open(&path).map(drop), ShardedFiles::open(&path).map(drop)];
    for refused in refused {
        let Err(LoadError::Open { source, .. }) = refused else { panic!("{refused:?}") };
        assert!(source.to_string().contains("not a regular file"), "{source}");
    }
    // One that an index names.
    let index = folder.path().join("model.safetensors.index.json");
    std::fs::write(&index, r#"{"weight_map": {"a": "model.safetensors"}}"#).unwrap();
    let refused = ShardedFiles::open(&index);
    assert!(matches!(refused, Err(LoadError::Open { .. })), "{refused:?}");
}

#[test]
fn an_index_that_is_longer_than_any_is_refused_before_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    // Without data: it would be read into memory all the same.
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let error = ShardedFiles::open(&path).unwrap_err().to_string();
    let limit = "it has 1099511627776 bytes, and an index at most 100000000";
    assert!(error.contains(limit), "{error}");
}

#[test]
fn texts_of_the_writer_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    write_file(&path, r#"{"__metadata__":{"format":"pt"}}"#, &[]);
    let file = SafetensorsFile::open(&path).unwrap();
    assert_eq!(file.metadata().get("format").map(String::as_str), Some("pt"));
    assert!(file.tensors().is_empty());

    let path = write_tensors(&folder.path().join("b.safetensors"), &tensors_of(&[3, 0, 5]));
    let file = SafetensorsFile::open(&path).unwrap();
    let lengths: Vec<_> = file.tensors().iter().map(memferry::load::Tensor::len).collect();
    assert_eq!(lengths, [3, 0, 5]);
}
